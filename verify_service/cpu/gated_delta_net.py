"""Adapters over transformers' Gated DeltaNet layers: tree convolution and ancestor-masked solve, state untouched.

The arithmetic up to the recurrence follows transformers' layer, rounding included (beta in the activations' format).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwood.device.layers import PackedLinear, packed
from verify_service.cpu.step_inputs import StepInputs
from verify_service.cpu.views import RecurrentView
from verify_service.kernels.reference.gdn_verify import gdn_over_tree
from verify_service.kernels.reference.tree_conv import tree_conv

MIXERS = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})


def _split_qwen3_next(mixer: Any) -> tuple[Tensor, ...]:
    """Rows of Qwen3-Next's interleaved projections in the order q, k, v, z, b, a."""
    hk, group = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
    dk, dv = mixer.head_k_dim, mixer.head_v_dim
    qkvz = mixer.in_proj_qkvz.weight.view(hk, 2 * dk + 2 * group * dv, -1).split([dk, dk, group * dv, group * dv], 1)
    ba = mixer.in_proj_ba.weight.view(hk, 2 * group, -1).split([group, group], 1)
    return tuple(part.reshape(-1, part.shape[-1]) for part in (*qkvz, *ba))


class TreeGatedDeltaNet(nn.Module):
    """Takes the place of `layer.linear_attn`; called by transformers' runner layer."""

    conv_weight: Tensor  # [kernel_size, C] float32
    decay: Tensor  # [HV] float32
    dt_bias: Tensor  # [HV] float32
    norm_weight: Tensor  # [V]

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.num_key_heads, self.num_value_heads = mixer.num_k_heads, mixer.num_v_heads
        self.key_dim, self.value_dim = mixer.head_k_dim, mixer.head_v_dim
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        self.qkv_sizes = [keys, keys, values]
        self.in_sizes = [2 * keys + values, values, self.num_value_heads, self.num_value_heads]
        if hasattr(mixer, "in_proj_qkvz"):
            self.in_proj = PackedLinear(*_split_qwen3_next(mixer))
        else:
            self.in_proj = packed(mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
        self.out_proj = packed(mixer.out_proj)
        self.eps = mixer.norm.variance_epsilon
        self.register_buffer("conv_weight", mixer.conv1d.weight[:, 0].t().contiguous().float(), persistent=False)
        self.register_buffer("decay", -mixer.A_log.detach().float().exp(), persistent=False)
        self.register_buffer("dt_bias", mixer.dt_bias.detach().float().clone(), persistent=False)
        self.register_buffer("norm_weight", mixer.norm.weight.detach().clone(), persistent=False)

    def forward(
        self,
        hidden_states: Tensor,  # [B, N, H]
        *,
        step: StepInputs,
        recurrent: RecurrentView,
        **_: Any,
    ) -> Tensor:  # [B, N, H]
        b, n, _hidden = hidden_states.shape
        inputs, z, beta, a = self.in_proj(hidden_states).split(self.in_sizes, -1)
        window = recurrent.windows.index_select(0, step.state_slots)
        conv = tree_conv(inputs, window, step.conv_index, self.conv_weight)
        q, k, v = conv.split(self.qkv_sizes, -1)
        qk = torch.cat([q, k], -1).view(b, n, 2, self.num_key_heads, self.key_dim)
        qk = qk * torch.rsqrt((qk * qk).sum(-1, keepdim=True) + 1e-6)
        q, k = qk.unbind(2)
        v = v.reshape(b, n, self.num_value_heads, self.value_dim)
        beta = beta.sigmoid().float()
        g = self.decay * F.softplus(a.float() + self.dt_bias)
        state = recurrent.states.index_select(0, step.state_slots)
        out = gdn_over_tree(q, k, v, g, beta, state, step.ancestor_mask, step.ancestor_bias)
        recurrent.inputs.copy_(inputs)
        recurrent.k.copy_(k)
        recurrent.v.copy_(v)
        recurrent.g.copy_(g)
        recurrent.beta.copy_(beta)
        return self.out_proj(self._gated_norm(out, z).reshape(b, n, -1))

    def _gated_norm(self, out: Tensor, z: Tensor) -> Tensor:
        """w * rmsnorm(o) * silu(z) per head, rounded as transformers rounds it."""
        out = F.rms_norm(out.to(z.dtype).float(), (self.value_dim,), None, self.eps).to(z.dtype)
        out = (self.norm_weight * out) * F.silu(z.float()).view_as(out)
        return out.to(z.dtype)
