"""What the engine needs to know of a target model: shapes and limits, as values."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION, GDN, MAMBA2, SHORT_CONV, OTHER = "attention", "gdn", "mamba2", "short convolution", "other"


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Shape of one recurrent layer's committed state.

    Mamba2 in these words: a group is a key head, B a key, a head's x a value, dt a beta. A short convolution has a
    window and no state: HK, HV, K and V are 0.
    """

    kind: str  # GDN, MAMBA2 or SHORT_CONV
    num_key_heads: int  # HK
    num_value_heads: int  # HV
    key_dim: int  # K
    value_dim: int  # V
    channels: int  # C = 2 HK K + HV V; the width of a short convolution
    conv_kernel_size: int  # convolution kernel size


NO_RECURRENCE = RecurrentShape("", 0, 0, 0, 0, 0, 1)


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Shapes and limits. `mixers` names each decoder layer's token mixers, in order: one, or attention beside a
    recurrent one, or none in a layer that is a feed-forward alone. All recurrent mixers of a model are of one kind.
    `layer_types` are the layers' types in transformers' configuration."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int  # HKV
    head_dim: int  # D
    mixers: tuple[tuple[str, ...], ...]
    layer_types: tuple[str, ...]
    recurrent: RecurrentShape | None
    max_positions: int
    stop_token_ids: tuple[int, ...]
    embedding_factor: float = 1.0  # where the model multiplies embeddings outside of their module
    logit_factor: float = 1.0
    logit_cap: float | None = None  # logits become cap * tanh(logit / cap), after the factor

    @property
    def num_attention_layers(self) -> int:
        """A: layers with a KV cache."""
        return sum(ATTENTION in mixers for mixers in self.mixers)

    @property
    def num_recurrent_layers(self) -> int:
        """R: layers with a recurrent state or a convolution window."""
        return sum(self.is_recurrent(mixers) for mixers in self.mixers)

    def is_recurrent(self, mixers: tuple[str, ...]) -> bool:
        """Whether one of a layer's mixers is recurrent."""
        return self.recurrent is not None and self.recurrent.kind in mixers

    @property
    def conv_kernel_size(self) -> int:
        """Convolution kernel size; 1 without recurrent layers."""
        return self.recurrent.conv_kernel_size if self.recurrent else 1
