"""The target model's pass over a batch of trees: hidden states, with_features features, and what a commit needs.

Transformers' runner layers run as they are defined, with `cache=None` and no mask; what a step needs travels through
their keyword arguments to the registered attention function and the replaced mixers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from draftwood.device.compilation import mark_varying
from draftwood.device.compiled_call_cache import CompiledCallCache
from draftwood.device.graphs import bucket
from draftwood.device.layers import packed
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import ATTENTION, NO_RECURRENCE, TargetSpec
from verify_service.cpu.attention import AttentionView
from verify_service.cpu.step_inputs import StepInputs
from verify_service.cpu.views import RecurrentView, WindowView
from verify_service.model.layer_groups import LayerGroup, LayerGroups, kind_of, own_storage
from verify_service.model.parts import read_parts
from verify_service.model.pre_norm import with_arguments
from verify_service.model.replace_layers import replace_parts, replaced_norm
from verify_service.model.rope import MAX_DEPTH_MARGIN, Rope, RopeTables

_STEP_TENSORS = tuple(part.name for part in fields(StepInputs))
MAX_SHAPES = 64  # of passes whose views are kept; loads that mix lengths make hundreds
LEAST_ARENA = 256  # nodes
GROUP_SIZE_ALONE = 4  # layers a graph for one sequence; hybrids repeat after 4 layers, so that few kinds are compiled


@dataclass(frozen=True, slots=True)
class CommitInputs:
    """What one pass leaves for the commit: rows of all attention layers, and the raw per-token inputs of all recurrent
    layers, which the commit replays along the accepted path. The sizes of a kind are its RecurrentShape's."""

    keys: Tensor  # [A, B, HKV, N, D], rotated
    values: Tensor  # [A, B, HKV, N, D]
    inputs: Tensor  # [R, B, N, C]
    k: Tensor  # [R, B, N, HK, K] float32
    v: Tensor  # [R, B, N, HV, V] float32
    g: Tensor  # [R, B, N, HV] float32
    beta: Tensor  # [R, B, N, HV] float32

    def attention(self, index: int, pools: Pools) -> AttentionView:
        """Attention layer `index`'s part, with its committed rows."""
        rows = (pools.keys, pools.values, self.keys, self.values)
        return AttentionView(*(own_storage(t[index]) for t in rows))

    def recurrent(self, index: int, pools: Pools) -> RecurrentView | WindowView:
        """Recurrent layer `index`'s part, with its committed state."""
        if not pools.states.numel():
            return WindowView(own_storage(pools.windows[index]), own_storage(self.inputs[index]))
        parts = (pools.states, pools.windows, self.inputs, self.k, self.v, self.g, self.beta)
        return RecurrentView(*(own_storage(t[index]) for t in parts))


@dataclass(frozen=True, slots=True)
class PassOutputs:
    """What a pass over B trees of N nodes gives."""

    hidden: Tensor  # [B, N, H] after the final norm
    target_features: Tensor | None  # [B, N, num_target_layers * H] residual stream after the with_features layers
    commit_inputs: CommitInputs


class _Arena:
    """The commit inputs's memory, the same for passes of all shapes: each pass overwrites what the last one left."""

    def __init__(self, spec: TargetSpec, num_nodes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.num_nodes = spec, num_nodes
        shape = spec.recurrent or NO_RECURRENCE
        a, r, kv = spec.num_attention_layers, spec.num_recurrent_layers, spec.num_kv_heads * spec.head_dim
        hv = shape.num_value_heads

        def new(layers: int, width: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, num_nodes * width, dtype=kind, device=device)

        self._rows = new(a, kv, dtype), new(a, kv, dtype)
        self._inputs = new(r, shape.channels, dtype)
        self._k, self._v = new(r, shape.num_key_heads * shape.key_dim), new(r, hv * shape.value_dim)
        self._gates = new(r, hv), new(r, hv)

    def commit_inputs(self, b: int, n: int) -> CommitInputs:
        """Its beginning as the commit inputs of a pass over B trees of N nodes."""
        spec, shape = self.spec, self.spec.recurrent or NO_RECURRENCE
        rows = (b, spec.num_kv_heads, n, spec.head_dim)

        def part(tensor: Tensor, *size: int) -> Tensor:
            return tensor[:, : math.prod(size)].view(tensor.shape[0], *size)

        return CommitInputs(
            keys=part(self._rows[0], *rows),
            values=part(self._rows[1], *rows),
            inputs=part(self._inputs, b, n, shape.channels),
            k=part(self._k, b, n, shape.num_key_heads, shape.key_dim),
            v=part(self._v, b, n, shape.num_value_heads, shape.value_dim),
            g=part(self._gates[0], b, n, shape.num_value_heads),
            beta=part(self._gates[1], b, n, shape.num_value_heads),
        )


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What passes of one shape share."""

    commit_inputs: CommitInputs
    arguments: list[dict[str, Any]]  # a layer
    calls: CompiledCallCache = field(default_factory=CompiledCallCache)


def _mark_dynamic(step: StepInputs, rope: Rope | dict[str, Rope] | None, arguments: list[dict[str, Any]]) -> None:
    """Tells the compiler which sizes vary from step to step: B, N and L."""
    angles = chain(*rope.values()) if isinstance(rope, dict) else rope or ()
    for tensor in (step.positions, step.prefix_slots, step.prefix_bias, step.conv_index, *angles):
        mark_varying(tensor, 0, 1)
    for tensor in (step.ancestor_mask, step.ancestor_bias):
        mark_varying(tensor, 0, 1, 2)
    mark_varying(step.state_slots, 0)
    for argument in arguments:
        for view in argument.values():
            for tensor, sizes in view.varying():
                mark_varying(tensor, *sizes)


class TargetModel:
    """The model in its serving form. Runs on one thread at a time."""

    def __init__(
        self, model: Any, spec: TargetSpec, *, target_layer_ids: tuple[int, ...], max_context: int, compile_steps: bool
    ) -> None:
        self.spec, self.target_layer_ids = spec, target_layer_ids
        body = read_parts(model)
        self.embed = body.embed
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        like = torch.zeros(1, dtype=self.dtype, device=self.device)
        self.rope = RopeTables(body.rotary, spec.layer_types, max_context + MAX_DEPTH_MARGIN, like)
        parts = zip(body.layers, spec.mixers, strict=True)
        has_graph = [replace_parts(layer, i, mixers) for i, (layer, mixers) in enumerate(parts)]
        self.layers: list[Any] = [
            self.rope.picking(with_arguments(layer), kind)
            for layer, kind in zip(body.layers, spec.layer_types, strict=True)
        ]
        kinds = [kind_of(layer) if has else None for layer, has in zip(self.layers, has_graph, strict=True)]
        layer_groups = LayerGroups(self.layers, kinds, compile_steps=compile_steps)
        # One sequence is where the time between operations counts most, and many shapes make long layer_groups slow to
        # compile.
        self.alone, self.several = layer_groups.cut(GROUP_SIZE_ALONE), layer_groups.cut(1)
        self.norm = replaced_norm(body.norm)
        self.head = packed(body.head)
        self.is_warming = False  # while it is, sizes that vary are marked so, and one graph serves them all
        self._arena = _Arena(spec, LEAST_ARENA, self.dtype, self.device)
        self._buffers: dict[tuple[int, int], _Buffers] = {}

    def _buffers_for(self, b: int, n: int, pools: Pools) -> _Buffers:
        """Views of the arena for a pass of this shape, kept for the next one."""
        buffers = self._buffers.pop((b, n), None)
        if buffers is None:
            if b * n > self._arena.num_nodes:
                self._buffers.clear()
                self._arena = _Arena(self.spec, bucket(b * n), self.dtype, self.device)
            while len(self._buffers) >= MAX_SHAPES:
                del self._buffers[next(iter(self._buffers))]  # the one that was not used for longest
            commit_inputs = self._arena.commit_inputs(b, n)
            buffers = _Buffers(commit_inputs, self._layer_arguments(commit_inputs, pools))
        self._buffers[(b, n)] = buffers
        return buffers

    def _layer_arguments(self, commit_inputs: CommitInputs, pools: Pools) -> list[dict[str, Any]]:
        """Each layer's view of the committed state and the commit inputs, as its keyword arguments."""
        arguments: list[dict[str, Any]] = []
        attention = recurrent = 0
        for mixers in self.spec.mixers:
            arguments.append({})
            if ATTENTION in mixers:
                arguments[-1]["attention"] = commit_inputs.attention(attention, pools)
                attention += 1
            if self.spec.is_recurrent(mixers):
                arguments[-1]["recurrent"] = commit_inputs.recurrent(recurrent, pools)
                recurrent += 1
        return arguments

    def run(self, step: StepInputs, pools: Pools, *, with_features: bool = True) -> PassOutputs:
        """One pass, always with the same pools. Changes no committed state; the commit inputs are valid until the
        next pass. With `with_features`, features come out where a drafter needs any."""
        hidden = self.embed(step.input_ids)
        if self.spec.embedding_factor != 1.0:
            hidden = hidden * self.spec.embedding_factor
        rope = self.rope.at(step.positions)
        b, n = step.input_ids.shape
        buffers = self._buffers_for(b, n, pools)
        if self.is_warming:
            _mark_dynamic(step, rope, buffers.arguments)
        after: list[Tensor] = []
        for group in self.alone if b == 1 else self.several:
            if self.is_warming:
                mark_varying(hidden, 0, 1)
            after += self._run(group, hidden, rope, step, buffers)
            hidden = after[-1]
        target_features = (
            torch.cat([after[i] for i in self.target_layer_ids], -1)
            if with_features and self.target_layer_ids
            else None
        )
        return PassOutputs(self.norm(hidden).to(self.dtype), target_features, buffers.commit_inputs)

    def _run(
        self,
        group: LayerGroup,
        hidden: Tensor,
        rope: Rope | dict[str, Rope] | None,
        step: StepInputs,
        buffers: _Buffers,
    ) -> list[Tensor]:
        extra = buffers.arguments[group.first : group.first + len(group.layers)]

        def run() -> list[Tensor]:
            return group.run(group.layers, hidden, rope, step, extra)

        if self.is_warming:
            return run()

        def constants() -> Iterator[Tensor]:
            for layer in group.layers:
                yield from chain(layer.parameters(), layer.buffers())
            for argument in extra:
                for view in argument.values():
                    yield from (getattr(view, part.name) for part in fields(view))

        angles = chain(*rope.values()) if isinstance(rope, dict) else rope or ()
        varying = (hidden, *angles, *(getattr(step, name) for name in _STEP_TENSORS))
        key = (group.first, step.prefix_slots.shape[1])  # the buffers have their own B and N
        outputs = buffers.calls.call(key, varying, run, constants)
        assert outputs is not None
        return outputs

    def touch(self, step: StepInputs, pools: Pools) -> None:
        """A pass over one group of each kind, for what the process keeps of products of so many rows."""
        hidden, rope = self.embed(step.input_ids), self.rope.at(step.positions)
        b, n = step.input_ids.shape
        arguments = self._buffers_for(b, n, pools).arguments
        kinds = {group.run: group for group in (self.alone if b == 1 else self.several)}
        for group in kinds.values():
            extra = arguments[group.first : group.first + len(group.layers)]
            group.run(group.layers, hidden, rope, step, extra)
        self.head(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., vocabulary], in the model's format."""
        logits = self.head(hidden)
        if self.spec.logit_factor != 1.0:
            logits = logits * self.spec.logit_factor
        if (cap := self.spec.logit_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits
