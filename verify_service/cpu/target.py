"""The target's pass over a batch of trees of any shape, as graphs of a compiler: the way of a CPU.

Transformers' decoder layers run as they are defined, with `cache=None` and no mask; what a step needs travels through
their keyword arguments to the registered attention function and the replaced mixers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from draftwood.device.compilation import mark_varying
from draftwood.device.compiled_call_cache import CompiledCallCache
from draftwood.device.graphs import bucket
from verify_service.cache.commit_inputs import Arena, CommitInputs
from verify_service.cache.layer_views import LayerArguments, layer_arguments
from verify_service.cpu.layers import ADAPTERS, ATTENTION_NAME
from verify_service.cpu.step_inputs import StepInputs
from verify_service.model.layer_groups import LayerGroup
from verify_service.model.replace_layers import replace_parts
from verify_service.model.rope import Rotation, angles
from verify_service.model.target import TargetModel, TargetParts

_STEP_TENSORS = tuple(part.name for part in fields(StepInputs))
MAX_SHAPES = 64  # of passes whose views are kept; loads that mix lengths make hundreds
LEAST_ARENA = 256  # nodes
GROUP_SIZE_ALONE = 4  # layers of a graph for one sequence; hybrids repeat after 4, so that few kinds are compiled


@dataclass(frozen=True, slots=True)
class PassOutputs:
    """What a pass over B trees of N nodes gives."""

    hidden: Tensor  # [B, N, H] after the final norm
    target_features: Tensor | None  # [B, N, num_target_layers * H] residual stream behind the target layers
    commit_inputs: CommitInputs


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What passes of one shape share."""

    commit_inputs: CommitInputs
    arguments: LayerArguments
    calls: CompiledCallCache = field(default_factory=CompiledCallCache)


class TreeTarget(TargetModel):
    """The model over dense masks."""

    def __init__(self, parts: TargetParts) -> None:
        super().__init__(parts, partial(replace_parts, adapters=ADAPTERS), ATTENTION_NAME)
        groups = self.grouped(self.layers_with_arguments())
        # One sequence is where the time between operations counts most, and many shapes make long groups slow to
        # compile.
        self.alone, self.several = groups.group_layers(GROUP_SIZE_ALONE), groups.group_layers(1)
        self.is_warming = False  # while it is, sizes that vary are marked so, and one graph serves them all
        self._arena = self._new_arena(LEAST_ARENA)
        self._buffers: dict[tuple[int, int], _Buffers] = {}

    def run(self, step: StepInputs, *, with_features: bool = True) -> PassOutputs:
        """One pass. Without `with_features` none come out; with it, they do where a drafter needs any."""
        hidden, rope = self.embedded(step.input_ids), self.rope.at(step.positions)
        b, n = step.input_ids.shape
        buffers = self._buffers_for(b, n)
        if self.is_warming:
            _mark_varying(step, rope, buffers.arguments)
        after: list[Tensor] = []
        for group in self.alone if b == 1 else self.several:
            if self.is_warming:
                mark_varying(hidden, 0, 1)
            after += self._run(group, hidden, rope, step, buffers)
            hidden = after[-1]
        is_wanted = with_features and self.target_layer_ids
        target_features = torch.cat([after[i] for i in self.target_layer_ids], -1) if is_wanted else None
        return PassOutputs(self.norm(hidden).to(self.dtype), target_features, buffers.commit_inputs)

    def _run(
        self, group: LayerGroup, hidden: Tensor, rope: Rotation, step: StepInputs, buffers: _Buffers
    ) -> list[Tensor]:
        arguments = group.of(buffers.arguments)

        def run() -> list[Tensor]:
            return group.run(group.layers, hidden, rope, step, arguments)

        if self.is_warming:
            return run()

        def constants() -> Iterator[Tensor]:
            for layer in group.layers:
                yield from chain(layer.parameters(), layer.buffers())
            for argument in arguments:
                for view in argument.values():
                    yield from (getattr(view, part.name) for part in fields(view))

        varying = (hidden, *angles(rope), *(getattr(step, name) for name in _STEP_TENSORS))
        key = (group.first, step.prefix_slots.shape[1])  # the buffers have their own B and N
        outputs = buffers.calls.call(key, varying, run, constants)
        assert outputs is not None
        return outputs

    def touch(self, step: StepInputs) -> None:
        """A pass over one group of each kind, for what the process keeps of products of so many rows."""
        hidden, rope = self.embedded(step.input_ids), self.rope.at(step.positions)
        b, n = step.input_ids.shape
        arguments = self._buffers_for(b, n).arguments
        for group in {group.kinds: group for group in (self.alone if b == 1 else self.several)}.values():
            group.run(group.layers, hidden, rope, step, group.of(arguments))
        self.head(hidden)

    def _buffers_for(self, b: int, n: int) -> _Buffers:
        """Views of the arena for a pass of this shape, kept for the next one."""
        buffers = self._buffers.pop((b, n), None)
        if buffers is None:
            if b * n > self._arena.num_nodes:
                self._buffers.clear()
                self._arena = self._new_arena(bucket(b * n))
            while len(self._buffers) >= MAX_SHAPES:
                del self._buffers[next(iter(self._buffers))]  # the one that was not used for longest
            commit_inputs = self._arena.commit_inputs(b, n)
            buffers = _Buffers(commit_inputs, layer_arguments(self.spec, commit_inputs, self.pools))
        self._buffers[(b, n)] = buffers
        return buffers

    def _new_arena(self, num_nodes: int) -> Arena:
        return Arena(self.spec, num_nodes, dtype=self.dtype, device=self.device)


def _mark_varying(step: StepInputs, rope: Rotation, arguments: LayerArguments) -> None:
    """Tells the compiler which sizes vary from step to step: B, N and L."""
    for tensor in (step.positions, step.prefix_slots, step.prefix_bias, step.conv_index, *angles(rope)):
        mark_varying(tensor, 0, 1)
    for tensor in (step.ancestor_mask, step.ancestor_bias):
        mark_varying(tensor, 0, 1, 2)
    mark_varying(step.state_slots, 0)
    for argument in arguments:
        for view in argument.values():
            for tensor in view.written():
                mark_varying(tensor, 0, 1)
