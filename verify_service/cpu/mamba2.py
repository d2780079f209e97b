"""Adapter over transformers' Mamba2 mixers: tree convolution and ancestor-masked scan, state untouched.

One class for all families, whose mixers are copies of each other but for the gated norm and Falcon-H1's multipliers.
The arithmetic up to the recurrence follows transformers' forward over a whole text, rounding included, and so does the
limit on time steps, which its one-token form leaves out (docs/decisions/0010).
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from draftwood.device.layers import packed
from draftwood.errors import UnsupportedModelError
from verify_service.cpu.step_inputs import StepInputs
from verify_service.cpu.views import RecurrentView
from verify_service.kernels.reference.mamba2_verify import mamba2_over_tree
from verify_service.kernels.reference.tree_conv import tree_conv

MIXERS = frozenset({"NemotronHMamba2Mixer", "GraniteMoeHybridMambaLayer", "FalconH1Mixer", "BambaMixer", "Mamba2Mixer"})


class GatedNorm(nn.Module):
    """RMSNorm in groups with a gate, before or after it, in float32 throughout; without a weight, the gate alone."""

    weight: Tensor | None  # [HV V]

    def __init__(self, norm: Any, size: int) -> None:
        super().__init__()
        weight = getattr(norm, "weight", None)
        self.register_buffer("weight", None if weight is None else weight.detach().clone(), persistent=False)
        self.eps = getattr(norm, "variance_epsilon", 0.0)
        self.group_size = getattr(norm, "group_size", size // getattr(norm, "n_groups", 1))
        self.is_norm_first = getattr(norm, "norm_before_gate", False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # [B, N, HV V] float32 each
        if self.weight is None:
            return x * F.silu(gate)
        gate = F.silu(gate.float())
        if not self.is_norm_first:
            x = x * gate
        x = F.rms_norm(x.unflatten(-1, (-1, self.group_size)), (self.group_size,), None, self.eps).flatten(-2)
        x = self.weight * x
        return x * gate if self.is_norm_first else x


class TreeMamba2(nn.Module):
    """Takes the place of `layer.mamba` or `layer.mixer`; called by transformers' runner layer."""

    conv_weight: Tensor  # [kernel_size, C] float32
    conv_bias: Tensor | None  # [C] float32
    decay: Tensor  # [HV] float32
    dt_bias: Tensor  # [HV]
    skip: Tensor  # [HV, 1] float32
    multipliers: Tensor | None  # [1, 1, 2 HV V + 2 HK K + HV]

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        if mixer.activation not in ("silu", "swish"):
            raise UnsupportedModelError(
                f"layer {mixer.layer_idx} has the activation {mixer.activation!r} in its convolution; silu is served",
                field="hidden_act",
            )
        self.num_groups, self.state_size = mixer.n_groups, mixer.ssm_state_size
        self.num_heads, self.head_dim = mixer.num_heads, mixer.head_dim
        values, keys = self.num_heads * self.head_dim, self.num_groups * self.state_size
        self.in_sizes = [values, values + 2 * keys, self.num_heads]
        self.conv_sizes = [values, keys, keys]
        self.limits: tuple[float, float] = tuple(mixer.time_step_limit)
        self.in_proj, self.out_proj = packed(mixer.in_proj), packed(mixer.out_proj)
        self.norm = GatedNorm(mixer.norm, values)
        self.in_multiplier: float = getattr(mixer, "ssm_in_multiplier", 1.0)
        bias = mixer.conv1d.bias
        self.register_buffer("conv_weight", mixer.conv1d.weight[:, 0].t().contiguous().float(), persistent=False)
        self.register_buffer("conv_bias", None if bias is None else bias.detach().float().clone(), persistent=False)
        self.register_buffer("decay", -mixer.A_log.detach().float().exp(), persistent=False)
        self.register_buffer("dt_bias", mixer.dt_bias.detach().clone(), persistent=False)
        self.register_buffer("skip", mixer.D.detach().float()[:, None].clone(), persistent=False)
        self.register_buffer("multipliers", getattr(mixer, "mup_vector", None), persistent=False)

    def forward(
        self,
        hidden_states: Tensor,  # [B, N, H]
        *,
        step: StepInputs,
        recurrent: RecurrentView,
        **_: Any,
    ) -> Tensor:  # [B, N, H]
        b, n, _hidden = hidden_states.shape
        projected = self.in_proj(hidden_states * self.in_multiplier if self.in_multiplier != 1.0 else hidden_states)
        if self.multipliers is not None:
            projected = projected * self.multipliers
        gate, inputs, dt = projected.split(self.in_sizes, -1)
        window = recurrent.windows.index_select(0, step.state_slots)
        conv = tree_conv(inputs, window, step.conv_index, self.conv_weight, self.conv_bias)
        values, keys, queries = conv.split(self.conv_sizes, -1)
        x = values.reshape(b, n, self.num_heads, self.head_dim)
        keys = keys.reshape(b, n, self.num_groups, self.state_size)
        queries = queries.reshape(b, n, self.num_groups, self.state_size)
        dt = F.softplus(dt + self.dt_bias.to(dt.dtype))
        if self.limits != (0.0, math.inf):
            dt = dt.clamp(*self.limits)
        dt = dt.float()
        g = self.decay * dt
        state = recurrent.states.index_select(0, step.state_slots)
        out = mamba2_over_tree(queries, keys, x, g, dt, state, step.ancestor_mask, step.ancestor_bias) + self.skip * x
        recurrent.inputs.copy_(inputs)
        recurrent.k.copy_(keys)
        recurrent.v.copy_(x)
        recurrent.g.copy_(g)
        recurrent.beta.copy_(dt)
        return self.out_proj(self.norm(out.reshape(b, n, -1), gate).to(hidden_states.dtype))
