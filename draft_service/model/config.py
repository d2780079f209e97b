"""What a DFlash checkpoint's config.json says, as a frozen value; everything that cannot be served is refused here.

Settings are looked up in `dflash_config` first, then at the top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftwood.checkpoint import default_target_layer_ids, read_config
from draftwood.errors import ConfigError, UnsupportedModelError

ARCHITECTURE = "DFlashDraftModel"
SLIDING, FULL = "sliding_attention", "full_attention"

# Keys of other drafter families: such a checkpoint computes something else than plain DFlash.
_FOREIGN_KEYS = (
    "projector_type", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "attention_sink_bias",
    "attention_value_scale", "aux_hidden_state_layer_ids", "attention_bias",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Which keys a layer's queries see: a key at k from a query at q where q - k < window, and inside the block k <= q
    (causal) or k - q < window (not causal). The context is always before the block."""

    window: int | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """A DFlash draft model."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]  # rope_theta, rope_type and what the type needs
    layers: tuple[LayerAttention, ...]
    block_size: int
    mask_token_id: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    sample_from_anchor: bool  # whether the root's row predicts depth 1, so that a block gives one depth more
    output_multiplier: float
    final_logit_softcapping: float | None
    input_embedding_scale: float

    @property
    def max_depth(self) -> int:
        """Depths that one block predicts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def context_window(self) -> int:
        """Tokens that the layers look back at most, the looking one included; 0 where one layer sees everything."""
        windows = [layer.window for layer in self.layers]
        return 0 if None in windows else max(window for window in windows if window is not None)

    def with_block_size(self, block_size: int) -> DrafterConfig:
        """The same with shorter blocks; 0 changes nothing."""
        if block_size and not 2 <= block_size <= self.block_size:
            raise ConfigError(
                f"--block-size is {block_size}, not in [2, {self.block_size}]; the draft model was trained on blocks "
                f"of {self.block_size}",
                field="block_size",
            )
        return replace(self, block_size=block_size or self.block_size)

    def with_window(self, window: int) -> DrafterConfig:
        """The same with every layer's view cut to `window` tokens; 0 changes nothing."""
        if not window:
            return self
        layers = tuple(replace(layer, window=min(layer.window or window, window)) for layer in self.layers)
        return replace(self, layers=layers)


class _Settings:
    """Look-ups in a config.json whose errors name the key and the value."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.top = config
        self.dflash: Mapping[str, Any] = config.get("dflash_config") or {}

    def get(self, key: str, default: Any = None) -> Any:
        """dflash_config's value, else the top level's, else the default; null counts as absent."""
        for source in (self.dflash, self.top):
            if source.get(key) is not None:
                return source[key]
        return default

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        """A whole number of at least `low`."""
        value = self.get(key, default)
        if value is None:
            raise UnsupportedModelError(f"config.json of the draft model has no {key}", field=key)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise refused(key, value, f"not a whole number of at least {low}")
        return value

    def number(self, key: str, default: float) -> float:
        """A real number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refused(key, value, "not a number")
        return float(value)


def refused(key: str, value: object, why: str) -> UnsupportedModelError:
    """The error for a setting that cannot be served."""
    return UnsupportedModelError(f"the draft model's {key} is {value!r}: {why}", field=key)


def read_drafter_config(directory: Path) -> DrafterConfig:
    """Reads and checks a draft model's config.json. Raises UnsupportedModelError naming the key and the value."""
    config = read_config(directory)
    settings = _Settings(config)
    _check_family(settings)
    num_layers, num_heads = settings.integer("num_hidden_layers"), settings.integer("num_attention_heads")
    hidden_size = settings.integer("hidden_size")
    num_target_layers = settings.integer("num_target_layers")
    num_kv_heads = settings.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise refused("num_key_value_heads", num_kv_heads, f"does not divide num_attention_heads ({num_heads})")
    vocab_size, mask_token_id = settings.integer("vocab_size"), settings.integer("mask_token_id", low=0)
    if mask_token_id >= vocab_size:
        raise refused("mask_token_id", mask_token_id, f"not below vocab_size ({vocab_size})")
    cap = settings.number("final_logit_softcapping", 0.0)
    return DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=settings.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        vocab_size=vocab_size,
        max_position_embeddings=settings.integer("max_position_embeddings", 32768),
        rope_parameters=_rope_parameters(settings),
        layers=_layers(settings, num_layers),
        block_size=settings.integer("block_size", low=2),
        mask_token_id=mask_token_id,
        num_target_layers=num_target_layers,
        target_layer_ids=_target_layer_ids(settings, num_layers, num_target_layers),
        sample_from_anchor=bool(settings.get("sample_from_anchor", False)),
        output_multiplier=settings.number("output_multiplier", 1.0),
        final_logit_softcapping=cap or None,
        input_embedding_scale=settings.number("input_embedding_scale", 1.0),
    )


def _check_family(settings: _Settings) -> None:
    """Refuses architectures and options whose arithmetic is not DFlash's."""
    architectures = settings.top.get("architectures") or [ARCHITECTURE]
    if architectures != [ARCHITECTURE]:
        raise refused("architectures", architectures, f"only {ARCHITECTURE} is served")
    for key in _FOREIGN_KEYS:
        value = settings.get(key)
        if value:
            raise refused(key, value, "plain DFlash has no such thing")
    if (activation := settings.get("hidden_act", "silu")) != "silu":
        raise refused("hidden_act", activation, "only silu is served")


def _target_layer_ids(settings: _Settings, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    ids = settings.get("target_layer_ids")
    if ids is None:
        return default_target_layer_ids(num_layers, num_target_layers)
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and 0 <= i < num_target_layers for i in ids):  # pyright: ignore[reportUnknownVariableType]
        raise refused("target_layer_ids", ids, f"not a list of layers in [0, {num_target_layers})")  # pyright: ignore[reportUnknownArgumentType]
    return tuple(ids)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _layers(settings: _Settings, num_layers: int) -> tuple[LayerAttention, ...]:
    """Windows by layer_types. Causal by is_causal at the top level, else dflash_config.causal, else where sliding."""
    window = settings.get("swa_window_size") or settings.get("sliding_window")
    types = settings.get("layer_types")
    if types is None:
        is_sliding = settings.get("use_swa", settings.get("use_sliding_window", False))
        first = 0 if settings.get("use_swa") else settings.get("max_window_layers", 0)
        types = [SLIDING if is_sliding and window and i >= first else FULL for i in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {SLIDING, FULL}:
        raise refused("layer_types", types, f"not {num_layers} times {SLIDING} or {FULL}")
    if SLIDING in types and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise refused("sliding_window", window, "sliding layers need a window of at least 1")
    causal = settings.top.get("is_causal")
    if causal is None:
        causal = settings.dflash.get("causal")
    return tuple(
        LayerAttention(window if kind == SLIDING else None, kind == SLIDING if causal is None else bool(causal))
        for kind in types
    )


def _rope_parameters(settings: _Settings) -> dict[str, Any]:
    """rope_parameters (transformers 5), or rope_theta and rope_scaling (before), in one form."""
    parameters: dict[str, Any] = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    nested = [key for key, value in parameters.items() if isinstance(value, dict)]
    if nested:
        raise refused("rope_parameters", parameters, f"settings of their own for {', '.join(nested)} are not served")
    parameters["rope_type"] = parameters.get("rope_type") or parameters.pop("type", None) or "default"
    theta = parameters.get("rope_theta") or settings.get("rope_theta")
    if not isinstance(theta, int | float) or theta <= 0:
        raise refused("rope_theta", theta, "not a positive number")
    parameters["rope_theta"] = float(theta)
    factor = parameters.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0
    if factor != 1.0:
        raise refused("partial_rotary_factor", factor, "only whole heads are rotated")
    return parameters
