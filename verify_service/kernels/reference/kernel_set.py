"""The kernels in plain PyTorch, on any device."""

from __future__ import annotations

from verify_service.kernels.kernel_set import KernelSet
from verify_service.kernels.reference.acceptance import accept_walk, sample
from verify_service.kernels.reference.between_products import add_norm, rotate_heads, swiglu
from verify_service.kernels.reference.commit import kv_commit, recurrent_commit
from verify_service.kernels.reference.conv_gate import conv_gate
from verify_service.kernels.reference.gdn_verify import gdn_verify
from verify_service.kernels.reference.mamba2_verify import mamba2_verify
from verify_service.kernels.reference.tree_attention import tree_attention
from verify_service.kernels.reference.tree_metadata import tree_metadata


class ReferenceKernels:
    """One twin per kernel."""

    is_capturable = False
    tree_metadata = staticmethod(tree_metadata)
    add_norm = staticmethod(add_norm)
    swiglu = staticmethod(swiglu)
    rotate_heads = staticmethod(rotate_heads)
    tree_attention = staticmethod(tree_attention)
    conv_gate = staticmethod(conv_gate)
    gdn_verify = staticmethod(gdn_verify)
    mamba2_verify = staticmethod(mamba2_verify)
    sample = staticmethod(sample)
    accept_walk = staticmethod(accept_walk)
    recurrent_commit = staticmethod(recurrent_commit)
    kv_commit = staticmethod(kv_commit)


PLAIN: KernelSet = ReferenceKernels()
