"""The target's pass over static buffers: from token ids to hidden states, and from those to logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from draftwood.layers import packed
from verify_service.cache.pools import Pools
from verify_service.cuda import layers as rows
from verify_service.cuda.buffers import Stash, StepBuffers
from verify_service.cuda.kernel_set import KernelSet
from verify_service.cuda.operators import Pass, running
from verify_service.target.body import read_body
from verify_service.target.fuse import fused_norm
from verify_service.target.rope import MAX_DEPTH_MARGIN, RopeTables
from verify_service.target.spec import ATTENTION, TargetSpec
from verify_service.target.stretches import Stretches, kind_of, own_storage

STRETCH = 4  # layers a compiled graph; hybrids repeat after 4 layers, so that few kinds are compiled


class RowTarget:
    """The model in its serving form over rows M = B * N. Runs on one thread at a time."""

    def __init__(
        self,
        model: Any,
        spec: TargetSpec,
        pools: Pools,
        kernels: KernelSet,
        *,
        tap_layer_ids: tuple[int, ...],
        max_context: int,
        page_size: int,
        compile_steps: bool,
    ) -> None:
        self.spec, self.pools, self.kernels, self.page_size = spec, pools, kernels, page_size
        self.tap_layer_ids, self.dtype, self.device = tap_layer_ids, model.dtype, model.device
        model.config._attn_implementation = rows.NAME
        body = read_body(model)
        self.embed = body.embed
        like = torch.zeros(1, dtype=self.dtype, device=self.device)
        self.rope = RopeTables(body.rotary, spec.layer_types, max_context + MAX_DEPTH_MARGIN, like)
        parts = enumerate(zip(body.layers, spec.mixers, strict=True))
        has_graph = [rows.prepare_layer(layer, i, mixers) for i, (layer, mixers) in parts]
        layers = [self.rope.picking(layer, kind) for layer, kind in zip(body.layers, spec.layer_types, strict=True)]
        kinds = [kind_of(layer) if has else None for layer, has in zip(layers, has_graph, strict=True)]
        is_cpu = self.device.type == "cpu"
        self.stretches = Stretches(layers, kinds, compile_steps=compile_steps, cpp_wrapper=is_cpu).cut(STRETCH)
        self.norm, self.head = fused_norm(body.norm), packed(body.head)
        self.is_capturable = all(has_graph)  # experts pick their tokens by data

    def run(self, buffers: StepBuffers) -> list[Tensor]:
        """One pass: fills the structure, the stash and `hidden` [B, N, H]; returns the tapped residual streams
        [1, M, H]. Changes no committed state."""
        s, m = buffers.structure, buffers.b * buffers.n
        self.kernels.tree_structure(s)
        hidden = self.embed(buffers.input_ids.view(1, m))
        if self.spec.embedding_factor != 1.0:
            hidden = hidden * self.spec.embedding_factor
        rope = self.rope.at(s.positions.view(1, m))
        after: list[Tensor] = []
        arguments = list(_arguments(self.spec, buffers.stash, self.pools, m))
        with running(Pass(self.kernels, s, self.page_size)):
            for stretch in self.stretches:
                extra = arguments[stretch.first : stretch.first + len(stretch.layers)]
                _mark_rows(hidden, rope, extra)
                after += stretch.run(stretch.layers, hidden, rope, None, extra)
                hidden = after[-1]
        buffers.hidden.view(1, m, -1).copy_(self.norm(hidden))
        return [after[i] for i in self.tap_layer_ids]

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] to [M, vocabulary], in the model's format."""
        out = hidden.new_empty(hidden.shape[0], self.spec.vocab_size)
        self.logits_into(hidden, out)
        return out

    def logits_into(self, hidden: Tensor, out: Tensor) -> None:
        """The same into memory that is there."""
        if self.head.is_packed or self.head.bias is not None:
            out.copy_(self.head(hidden))
        else:
            torch.mm(hidden, self.head.weight.t(), out=out)
        if self.spec.logit_factor != 1.0:
            out.mul_(self.spec.logit_factor)
        if (cap := self.spec.logit_cap) is not None:
            out.div_(cap).tanh_().mul_(cap)


def _arguments(spec: TargetSpec, stash: Stash, pools: Pools, m: int) -> Iterator[dict[str, Any]]:
    """Each layer's view of the committed state and the stash, as its keyword arguments."""
    attention = recurrent = 0
    for mixers in spec.mixers:
        arguments: dict[str, Any] = {}
        if ATTENTION in mixers:
            keys, values = (_rows(t, attention, m) for t in (stash.keys, stash.values))
            pooled = (own_storage(pools.keys[attention]), own_storage(pools.values[attention]))
            arguments["attention"] = rows.AttentionRows(*pooled, keys, values)
            attention += 1
        if spec.is_recurrent(mixers):
            written = (stash.inputs, stash.conv, stash.norms, stash.g, stash.beta)
            state = (own_storage(pools.states[recurrent]), own_storage(pools.windows[recurrent]))
            arguments["recurrent"] = rows.RecurrentRows(*state, *(_rows(t, recurrent, m) for t in written))
            recurrent += 1
        yield arguments


def _rows(tensor: Tensor, layer: int, m: int) -> Tensor:
    """[layers, B, N, ...] to the layer's [M, ...]."""
    return own_storage(tensor[layer].view(m, *tensor.shape[3:]))


def _mark_rows(hidden: Tensor, rope: Any, arguments: list[dict[str, Any]]) -> None:
    """Tells the compiler that M varies; a graph of its own serves M = 1."""
    if hidden.shape[1] == 1:
        return
    mark: Any = torch._dynamo.maybe_mark_dynamic  # pyright: ignore[reportPrivateUsage]
    mark(hidden, 1)
    angles = [t for pair in rope.values() for t in pair] if isinstance(rope, dict) else rope or ()
    for tensor in angles:
        mark(tensor, 1)
    for argument in arguments:
        if (attention := argument.get("attention")) is not None:
            mark(attention.keys, 0)
            mark(attention.values, 0)
        if (recurrent := argument.get("recurrent")) is not None:
            for tensor in (recurrent.inputs, recurrent.conv, recurrent.norms, recurrent.g, recurrent.beta):
                mark(tensor, 0)
