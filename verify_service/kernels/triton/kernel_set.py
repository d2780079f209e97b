"""The kernels in Triton. Imports Triton, and so is imported where a GPU is sure."""

from __future__ import annotations

from verify_service.kernels.triton.acceptance import Sample, accept_walk
from verify_service.kernels.triton.between_products import add_norm, rotate_heads, swiglu
from verify_service.kernels.triton.commit import kv_commit, recurrent_commit
from verify_service.kernels.triton.conv_gate import conv_gate
from verify_service.kernels.triton.gdn_verify import GdnVerify
from verify_service.kernels.triton.mamba2_verify import mamba2_verify
from verify_service.kernels.triton.tree_attention import tree_attention
from verify_service.kernels.triton.tree_metadata import tree_metadata


class TritonKernels:
    """One launcher per kernel. Two keep scratch memory, and are made anew for each set."""

    is_capturable = True
    tree_metadata = staticmethod(tree_metadata)
    add_norm = staticmethod(add_norm)
    swiglu = staticmethod(swiglu)
    rotate_heads = staticmethod(rotate_heads)
    tree_attention = staticmethod(tree_attention)
    conv_gate = staticmethod(conv_gate)
    mamba2_verify = staticmethod(mamba2_verify)
    accept_walk = staticmethod(accept_walk)
    recurrent_commit = staticmethod(recurrent_commit)
    kv_commit = staticmethod(kv_commit)

    def __init__(self) -> None:
        self.gdn_verify = GdnVerify()
        self.sample = Sample()
