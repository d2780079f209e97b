"""Gated DeltaNet layers of transformers: their weights and projections, for the passes of either device."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from draftwood.device.layers import PackedLinear, packed

MIXERS = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})


def _split_qwen3_next(mixer: Any) -> tuple[Tensor, ...]:
    """Rows of Qwen3-Next's interleaved projections in the order q, k, v, z, b, a."""
    hk, group = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
    dk, dv = mixer.head_k_dim, mixer.head_v_dim
    qkvz = mixer.in_proj_qkvz.weight.view(hk, 2 * dk + 2 * group * dv, -1).split([dk, dk, group * dv, group * dv], 1)
    ba = mixer.in_proj_ba.weight.view(hk, 2 * group, -1).split([group, group], 1)
    return tuple(part.reshape(-1, part.shape[-1]) for part in (*qkvz, *ba))


class GatedDeltaNet(nn.Module):
    """What takes the place of `layer.linear_attn`, but for its forward pass."""

    conv_weight: Tensor  # [kernel_size, C] float32
    decay: Tensor  # [HV] float32
    dt_bias: Tensor  # [HV] float32
    norm_weight: Tensor  # [V]

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.num_key_heads, self.num_value_heads = mixer.num_k_heads, mixer.num_v_heads
        self.key_dim, self.value_dim = mixer.head_k_dim, mixer.head_v_dim
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        self.conv_sizes = [2 * keys, values]
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
