"""Adapter over LFM2's short convolutions: a gated convolution along tree paths; a window is all that it remembers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from draftwood.device.layers import packed
from verify_service.cpu.step_inputs import StepInputs
from verify_service.cpu.views import WindowView
from verify_service.kernels.reference.tree_conv import tree_conv

MIXERS = frozenset({"Lfm2ShortConv"})


class TreeShortConv(nn.Module):
    """Takes the place of `layer.conv`: out(C * conv(B * x)), no activation."""

    conv_weight: Tensor  # [kernel_size, C] float32
    conv_bias: Tensor | None  # [C] float32

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.in_proj, self.out_proj = packed(mixer.in_proj), packed(mixer.out_proj)
        bias = mixer.conv.bias
        self.register_buffer("conv_weight", mixer.conv.weight[:, 0].t().contiguous().float(), persistent=False)
        self.register_buffer("conv_bias", None if bias is None else bias.detach().float().clone(), persistent=False)

    def forward(
        self,
        hidden_states: Tensor,  # [B, N, H]
        *,
        step: StepInputs,
        recurrent: WindowView,
        **_: Any,
    ) -> Tensor:  # [B, N, H]
        b, c, x = self.in_proj(hidden_states).chunk(3, -1)
        inputs = b * x
        window = recurrent.windows.index_select(0, step.state_slots)
        conv = tree_conv(inputs, window, step.conv_index, self.conv_weight, self.conv_bias, silu=False)
        recurrent.inputs.copy_(inputs)
        return self.out_proj(c * conv.to(inputs.dtype))
