"""Short convolutions of LFM2: their weights and projections, for the passes of either device."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from draftwood.device.layers import packed

MIXERS = frozenset({"Lfm2ShortConv"})


class ShortConvolution(nn.Module):
    """What takes the place of `layer.conv`, but for its forward pass: out(C * conv(B * x)), no activation."""

    conv_weight: Tensor  # [kernel_size, C] float32
    conv_bias: Tensor | None  # [C] float32

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.in_proj, self.out_proj = packed(mixer.in_proj), packed(mixer.out_proj)
        bias = mixer.conv.bias
        self.register_buffer("conv_weight", mixer.conv.weight[:, 0].t().contiguous().float(), persistent=False)
        self.register_buffer("conv_bias", None if bias is None else bias.detach().float().clone(), persistent=False)
