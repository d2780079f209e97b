"""The target model in its serving form, as far as it is the same on every device: its parts, its layers in groups that
are one graph each, and its logits. What differs is the pass, which cpu/target.py and gpu/target.py add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.device.layers import packed
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import TargetSpec
from verify_service.model.layer_groups import LayerGroups, kind_of
from verify_service.model.replace_layers import replaced_norm, with_arguments
from verify_service.model.rope import MAX_DEPTH_MARGIN, RopeTables

_FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "embedding_norm")  # in models of different families


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a target is made of, whatever the device."""

    model: Any  # transformers' causal language model
    spec: TargetSpec
    pools: Pools
    target_layer_ids: tuple[int, ...]  # whose residual streams a pass gives
    max_context: int
    compile_steps: bool


class TargetModel:
    """Transformers' decoder layers with the project's own parts, over the pools of committed state. Passes change none
    of it. Runs on one thread at a time."""

    def __init__(
        self, parts: TargetParts, prepare_layer: Callable[[Any, int, tuple[str, ...]], bool], attention: str
    ) -> None:
        """`prepare_layer` swaps a layer's parts in place and says whether the layer can be compiled as one graph;
        `attention` is the registered function that attention layers call."""
        model, spec = parts.model, parts.spec
        self.spec, self.pools, self.target_layer_ids = spec, parts.pools, parts.target_layer_ids
        self.max_context, self.is_compiled = parts.max_context, parts.compile_steps
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        model.config._attn_implementation = attention
        inner = model.base_model
        self.embed: nn.Module = inner.get_input_embeddings()
        like = torch.zeros(1, dtype=self.dtype, device=self.device)
        rotary = getattr(inner, "rotary_emb", None)  # None: positions are not rotated
        self.rope = RopeTables(rotary, spec.layer_types, self.max_context + MAX_DEPTH_MARGIN, like)
        self.layers: list[nn.Module] = list(inner.layers)
        layers = enumerate(zip(self.layers, spec.mixers, strict=True))
        self.has_graph = [prepare_layer(layer, i, mixers) for i, (layer, mixers) in layers]
        norm = next(getattr(inner, name) for name in _FINAL_NORMS if hasattr(inner, name))
        self.norm, self.head = replaced_norm(norm), packed(model.lm_head)

    def layers_with_arguments(self) -> list[nn.Module]:
        """The layers in forms that take rotations by layer type and pass on what a step has for their mixers."""
        of_types = zip(self.layers, self.spec.layer_types, strict=True)
        return [self.rope.picking(with_arguments(layer), kind) for layer, kind in of_types]

    def grouped(self, layers: Sequence[nn.Module], **settings: Any) -> LayerGroups:
        """The layers, one for each of the model's, ready to be cut into groups; `settings` as of LayerGroups."""
        kinds = [kind_of(layer) if has else None for layer, has in zip(layers, self.has_graph, strict=True)]
        return LayerGroups(layers, kinds, compile_steps=self.is_compiled, **settings)

    def embedded(self, token_ids: Tensor) -> Tensor:
        """The residual stream [..., H] in front of the first layer, of token ids [...]."""
        hidden = self.embed(token_ids)
        return hidden * self.spec.embedding_factor if self.spec.embedding_factor != 1.0 else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., vocab_size], in the model's format."""
        return self.scale_logits(self.head(hidden))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """The model's own factor and cap on logits, in place."""
        if self.spec.logit_factor != 1.0:
            logits.mul_(self.spec.logit_factor)
        if (cap := self.spec.logit_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits
