"""Mixers of transformers' decoder layers over trees, for a compiler that sees all of them: the way of a CPU.

What a step needs is dense here (ancestor masks, window indices), so that inductor can trace and fuse it; kernels behind
operators over rows, as on a GPU, would cost a CPU more than they save (docs/decisions/0014, 0016). The arithmetic up to
the recurrences follows transformers' layers, rounding included. The committed state is only read.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_service.cache.layer_views import AttentionView, RecurrentView
from verify_service.core.target_spec import GDN, MAMBA2, SHORT_CONV
from verify_service.cpu.step_inputs import StepInputs
from verify_service.kernels.reference.conv_gate import tree_conv
from verify_service.kernels.reference.gdn_verify import gdn_over_tree
from verify_service.kernels.reference.mamba2_verify import mamba2_over_tree
from verify_service.kernels.reference.tree_attention import attention_over_tree
from verify_service.model.attention import register_attention
from verify_service.model.mixers.gated_delta_net import GatedDeltaNet
from verify_service.model.mixers.mamba2 import Mamba2
from verify_service.model.mixers.short_convolution import ShortConvolution

ATTENTION_NAME = "draftwood_tree"


def attend(
    query: Tensor, key: Tensor, value: Tensor, view: AttentionView, step: StepInputs, *, scaling: float, **settings: Any
) -> Tensor:
    """As model.attention says."""
    prefix = (view.key_pool, view.value_pool, step.prefix_slots, step.prefix_bias)
    out = attention_over_tree(query, key, value, *prefix, step.ancestor_bias, step.positions, scaling, **settings)
    view.keys.copy_(key.transpose(1, 2))
    view.values.copy_(value.transpose(1, 2))
    return out


register_attention(ATTENTION_NAME, attend)


class TreeGatedDeltaNet(GatedDeltaNet):
    """Tree convolution and ancestor-masked solve, of hidden states [B, N, H] to [B, N, H], here and below."""

    def forward(self, hidden_states: Tensor, *, step: StepInputs, recurrent: RecurrentView, **_: Any) -> Tensor:
        b, n, _hidden = hidden_states.shape
        inputs, z, beta, a = self.in_proj(hidden_states).split(self.in_sizes, -1)
        window = recurrent.windows.index_select(0, step.state_slots)
        conv = tree_conv(inputs, window, step.conv_index, self.conv_weight)
        qk, v = conv.split(self.conv_sizes, -1)
        qk = qk.view(b, n, 2, self.num_key_heads, self.key_dim)
        norms = torch.rsqrt((qk * qk).sum(-1, keepdim=True) + 1e-6)
        q, k = (qk * norms).unbind(2)
        v = v.reshape(b, n, self.num_value_heads, self.value_dim)
        beta = beta.sigmoid().float()
        g = self.decay * F.softplus(a.float() + self.dt_bias)
        state = recurrent.states.index_select(0, step.state_slots)
        out = gdn_over_tree(q, k, v, g, beta, state, step.ancestor_mask, step.ancestor_bias)
        recurrent.inputs.copy_(inputs)
        recurrent.conv.copy_(conv)
        recurrent.norms.copy_(norms.view(b, n, -1))
        recurrent.g.copy_(g)
        recurrent.beta.copy_(beta)
        return self.out_proj(self._gated_norm(out, z).reshape(b, n, -1))

    def _gated_norm(self, out: Tensor, z: Tensor) -> Tensor:
        """w * rmsnorm(o) * silu(z) per head, rounded as transformers rounds it."""
        out = F.rms_norm(out.to(z.dtype).float(), (self.value_dim,), None, self.eps).to(z.dtype)
        out = (self.norm_weight * out) * F.silu(z.float()).view_as(out)
        return out.to(z.dtype)


class TreeMamba2(Mamba2):
    """Tree convolution and ancestor-masked scan."""

    def forward(self, hidden_states: Tensor, *, step: StepInputs, recurrent: RecurrentView, **_: Any) -> Tensor:
        b, n, _hidden = hidden_states.shape
        gate, inputs, dt = self.projected(hidden_states)
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
        recurrent.conv.copy_(conv)
        recurrent.g.copy_(g)
        recurrent.beta.copy_(dt)
        return self.output(out.reshape(b, n, -1), gate, hidden_states.dtype)


class TreeShortConvolution(ShortConvolution):
    """Tree convolution; a window is all that it remembers."""

    def forward(self, hidden_states: Tensor, *, step: StepInputs, recurrent: RecurrentView, **_: Any) -> Tensor:
        b, c, x = self.in_proj(hidden_states).chunk(3, -1)
        inputs = b * x
        window = recurrent.windows.index_select(0, step.state_slots)
        conv = tree_conv(inputs, window, step.conv_index, self.conv_weight, self.conv_bias, silu=False)
        recurrent.inputs.copy_(inputs)
        return self.out_proj(c * conv.to(inputs.dtype))


ADAPTERS = {GDN: TreeGatedDeltaNet, MAMBA2: TreeMamba2, SHORT_CONV: TreeShortConvolution}
