"""Causal convolution along tree paths, with norms and gates of the recurrence behind it, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_service.kernels.arguments import Convolution, Gates, LayerCommitInputs, TreeMetadata
from verify_service.kernels.reference.tree_conv import conv_index, tree_conv


def conv_gate(
    x: Tensor,  # [B, N, C]
    tree: TreeMetadata,
    windows: Tensor,  # [T, kernel_size - 1, C]
    convolution: Convolution,
    gates: Gates | None,
    commit_inputs: LayerCommitInputs,  # written
    *,
    key_dim: int = 0,  # K, of the normed heads
) -> None:
    """`tree_conv` over the windows of the sequences' slots."""
    weight, bias = convolution.weight, convolution.bias
    index = conv_index(tree.parents, weight.shape[0])
    conv = tree_conv(x, windows[tree.state_slots.long()], index, weight, bias, silu=convolution.silu)
    commit_inputs.inputs.copy_(x)
    commit_inputs.conv.copy_(conv)
    if (norms := commit_inputs.norms) is not None:
        heads = conv[..., : norms.shape[-1] * key_dim].unflatten(-1, (-1, key_dim))
        norms.copy_(torch.rsqrt((heads * heads).sum(-1) + 1e-6))
    if gates is not None:
        _write_gates(gates, commit_inputs.g, commit_inputs.beta)


def _write_gates(gates: Gates, g: Tensor, beta: Tensor) -> None:
    step, bias = gates.step, gates.dt_bias
    if gates.write is None:
        dt = F.softplus(step + bias.to(step.dtype)).clamp(*gates.limits).float()
        g.copy_(gates.decay * dt)
        beta.copy_(dt)
    else:
        g.copy_(gates.decay * F.softplus(step.float() + bias.float()))
        beta.copy_(gates.write.sigmoid())
