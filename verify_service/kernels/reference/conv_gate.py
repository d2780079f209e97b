"""Causal convolution along tree paths, with norms and gates of the recurrence behind it, in plain PyTorch.

A node's window is itself and its nearest ancestors (kernel size - 1 of them), falling back to the committed window
above the root.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_service.kernels.arguments import Convolution, Gates, LayerCommitInputs, TreeMetadata


def tree_conv(
    inputs: Tensor,  # [B, N, C]
    window: Tensor,  # [B, kernel_size - 1, C] committed inputs, newest last
    index: Tensor,  # [B, N, kernel_size] int64, rows of (window ++ inputs), oldest first
    weight: Tensor,  # [kernel_size, C] float32
    bias: Tensor | None = None,  # [C] float32
    *,
    silu: bool = True,
) -> Tensor:  # [B, N, C] float32
    """The convolution, by default under a SiLU, summed in float32 from the oldest input on; rounded once to the format
    of its inputs."""
    b, n, channels = inputs.shape
    kernel_size = weight.shape[0]
    rows = torch.cat([window, inputs], 1)  # [B, kernel_size - 1 + N, C]
    offset = torch.arange(b, device=inputs.device).view(b, 1, 1) * (kernel_size - 1 + n)
    gathered = rows.view(-1, channels).index_select(0, (index + offset).reshape(-1)).view(b, n, kernel_size, channels)
    out = (gathered.float() * weight).sum(2)
    if bias is not None:
        out = out + bias
    return (F.silu(out) if silu else out).to(inputs.dtype).float()


def conv_index(
    parents: Tensor,  # [B, N], negative for the root and spare nodes
    kernel_size: int,
) -> Tensor:  # [B, N, kernel_size] int64
    """Rows of (window ++ inputs) that each node's convolution reads, oldest first: the walk up from the node, and where
    it leaves the tree, down the window."""
    at = torch.arange(parents.shape[1], device=parents.device).expand(parents.shape)
    rows: list[Tensor] = []
    for _ in range(kernel_size):
        rows.append(kernel_size - 1 + at)
        at = torch.where(at >= 0, parents.long().gather(1, at.clamp(min=0)), at - 1)
    return torch.stack(rows[::-1], -1)


def conv_gate(
    x: Tensor,
    tree: TreeMetadata,
    windows: Tensor,
    convolution: Convolution,
    gates: Gates | None,
    commit_inputs: LayerCommitInputs,
    *,
    key_dim: int = 0,
) -> None:
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
