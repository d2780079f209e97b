"""How transformers' attention layers come to call ours: a function under a name of its own in their registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from verify_service.cache.layer_views import AttentionView


def register_attention(name: str, attend: Callable[..., Tensor]) -> None:
    """From now on models whose configuration names it call `attend`: attention of tree nodes over the committed prefix
    and their own ancestors. It leaves keys and values in the view `attention`; that and `step`, what the pass has for
    all layers, are what the decoder layer was given."""

    def attention_function(
        module: nn.Module,
        query: Tensor,  # [B, HQ, N, D], rotated
        key: Tensor,  # [B, HKV, N, D], rotated
        value: Tensor,  # [B, HKV, N, D]
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,  # [HQ], sinks
        *,
        step: Any,
        attention: AttentionView,
        **_: Any,
    ) -> tuple[Tensor, None]:  # [B, N, HQ, D]
        del module, attention_mask, dropout
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        settings: dict[str, Any] = {"sliding_window": sliding_window, "soft_cap": softcap, "sinks": s_aux}
        return attend(query, key, value, attention, step, scaling=scale, **settings), None

    AttentionInterface.register(name, attention_function)
