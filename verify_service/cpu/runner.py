"""Steps whose passes run over whatever shapes come, stage by stage from the host: the way of a CPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwood.tree import DraftTree
from verify_service.cache.pages import SCRATCH_SLOT
from verify_service.cache.pools import reset_slot
from verify_service.core.sequence import PREFILL_CHUNK, SequenceState
from verify_service.cpu.commit import Committer, RowProjection
from verify_service.cpu.step_inputs import StepInputs, StepRow, build_step_inputs, padded
from verify_service.cpu.target import PassOutputs, TreeTarget
from verify_service.model.features import FeatureProjector
from verify_service.step.runner import Load, StepRunner
from verify_service.step.walk import SequenceTree, Walk

log = logging.getLogger(__name__)

# Passes whose products are made in advance; code for each number of rows costs memory, 90 MiB for these.
WARM_BATCH, WARM_ROWS = 8, 512


@dataclass(frozen=True, slots=True)
class Verified:
    """A pass over the trees of a batch."""

    outputs: PassOutputs
    logits: Tensor  # [B, N, vocab_size]


class PassRunner(StepRunner[StepInputs, Verified]):
    """All methods are called on the engine's thread."""

    target: TreeTarget

    def __init__(self, target: TreeTarget, projector: FeatureProjector | None) -> None:
        super().__init__(target)
        compile_steps = target.is_compiled
        self.committer = Committer(target.pools, target.spec.recurrent, compile_steps=compile_steps)
        self.projection = RowProjection(projector, compile_steps=compile_steps) if projector else None

    @torch.inference_mode()
    def warm_up(self, load: Load) -> None:
        """Passes of one and of several sequences, of lone roots and of trees, on scratch slots alone."""
        verb = "compiling" if self.target.is_compiled else "warming up"
        if self.target.is_compiled:
            log.info(
                "compiling steps: three to five minutes on two cores at the first start, half a minute to a minute "
                "from the cache in ~/.cache/draftwood later"
            )
        self.target.is_warming = True
        nodes = load.tree_budget + 1
        passes = [(1, 1), (1, nodes), *([(2, nodes)] if load.max_batch > 1 else [])]
        for number, (b, n) in enumerate(passes, start=1):
            who = "one request" if b == 1 else "several requests"
            what = "a lone token" if n == 1 else f"{n} tokens"
            log.info("%s %d of %d: %s, %s", verb, number, len(passes), who, what)
            self._warm_pass(b, n)
        self.target.is_warming = False
        self._touch_all(load.max_batch)
        # The largest passes last: what they need is then the process's own before the first request, and the heap does
        # not grow among what requests leave behind.
        prompts = min(max(load.prefill_tokens // PREFILL_CHUNK, 1), load.max_batch)
        self._warm_pass(prompts, min(load.prefill_tokens, PREFILL_CHUNK))
        self._warm_pass(load.max_batch, load.max_tree_budget + 1)
        reset_slot(self.target.pools, 0)

    def prefill(self, parts: Sequence[tuple[SequenceState, int]]) -> None:
        outputs = self.target.run(self.build_inputs([_prompt_chain(*part) for part in parts]))
        self._commit([(i, sequence, range(length)) for i, (sequence, length) in enumerate(parts)], outputs)
        for i, (sequence, length) in enumerate(parts):
            self.note_prefilled(sequence, outputs.hidden[i, :length])

    def build_inputs(self, batch: Sequence[SequenceTree]) -> StepInputs:
        rows = [StepRow(tree, s.base_length, s.slots, s.state_slot) for s, tree in batch]
        return build_step_inputs(rows, kernel_size=self.target.spec.conv_kernel_size)

    def verify(self, batch: Sequence[SequenceTree], inputs: StepInputs) -> Verified:
        outputs = self.target.run(inputs, with_features=any(_needs_features(s) for s, _ in batch))
        num_nodes = padded(max(tree.num_nodes for _, tree in batch))
        return Verified(outputs, self.target.logits(outputs.hidden[:, :num_nodes]))

    def accept(self, batch: Sequence[SequenceTree], verified: Verified) -> list[Walk]:
        return [self.walk(entry, verified.logits[i]) for i, entry in enumerate(batch)]

    def commit(self, batch: Sequence[SequenceTree], walks: Sequence[Walk], verified: Verified) -> None:
        rows = enumerate(zip(batch, walks, strict=True))
        parts = [(i, entry.sequence, walk.accepted.path) for i, (entry, walk) in rows if walk.goes_on]
        self._commit(parts, verified.outputs)

    def _commit(self, parts: Sequence[tuple[int, SequenceState, Sequence[int]]], outputs: PassOutputs) -> None:
        """Commits each sequence's path in its row of the pass."""
        features = self._features(parts, outputs)
        for row, sequence, path in parts:
            base = sequence.base_length
            slots = sequence.slots[base : base + len(path)]
            self.committer.commit(outputs.commit_inputs, row, path, slots, sequence.state_slot, features.get(row))

    def _features(
        self, parts: Sequence[tuple[int, SequenceState, Sequence[int]]], outputs: PassOutputs
    ) -> dict[int, Tensor]:
        """The paths' projected rows [P, F], by the row of the pass: one product for all of them."""
        paths = {row: path for row, sequence, path in parts if _needs_features(sequence)}
        features = outputs.target_features
        if self.projection is None or features is None or not paths:
            return {}
        index = [row * features.shape[1] + node for row, path in paths.items() for node in path]
        rows = self.projection(features.flatten(0, 1), index).split([len(path) for path in paths.values()])
        return dict(zip(paths, rows, strict=True))

    def _touch_all(self, max_batch: int) -> None:
        """Has code made for every number of rows of products, so that memory does not grow when a rare one comes."""
        shapes = shapes_by_rows(min(max_batch, WARM_BATCH), WARM_ROWS)
        started = time.perf_counter()
        for b, n in shapes.values():
            self.target.touch(self._chains(b, n))
        if self.projection is not None:
            width = self.target.spec.hidden_size * len(self.target.target_layer_ids)
            target_features = torch.zeros(1, width, dtype=self.target.dtype)
            for rows in sorted({padded(n) for n in range(2, WARM_ROWS + 1)}):
                self.projection(target_features, [0] * rows)
        log.info("warmed up %d numbers of rows in %.1f s", len(shapes), time.perf_counter() - started)

    def _warm_pass(self, b: int, nodes: int) -> None:
        """A pass and a commit of one token."""
        outputs = self.target.run(self._chains(b, nodes))
        self.target.logits(outputs.hidden)
        self.committer.commit(outputs.commit_inputs, 0, (0,), np.array([SCRATCH_SLOT]), 0, None)
        if self.projection is not None and outputs.target_features is not None:
            self.projection(outputs.target_features[0], list(range(nodes)))

    def _chains(self, b: int, nodes: int) -> StepInputs:
        """Chains behind one token."""
        row = StepRow(DraftTree.chain(0, [0] * (nodes - 1)), 1, np.array([SCRATCH_SLOT]), 0)
        return build_step_inputs([row] * b, kernel_size=self.target.spec.conv_kernel_size)


def _prompt_chain(sequence: SequenceState, length: int) -> SequenceTree:
    base = sequence.base_length
    part = sequence.request.prompt_token_ids[base : base + length]
    return SequenceTree(sequence, DraftTree.chain(part[0], part[1:]))


def _needs_features(sequence: SequenceState) -> bool:
    """A request without drafts does not; all others do, drafter or no drafter, for the one to come."""
    return sequence.request.algorithm != "none"


def shapes_by_rows(max_batch: int, max_rows: int) -> dict[int, tuple[int, int]]:
    """B and N of one pass for each number of rows B N, up to `max_rows`, that passes of prompts and trees may have."""
    nodes = sorted({padded(n) for n in range(1, PREFILL_CHUNK + 1)})
    shapes = [(b, n) for b in range(1, max_batch + 1) for n in nodes if b == 1 or n > 1]
    return {b * n: (b, n) for b, n in sorted(shapes, reverse=True) if b * n <= max_rows}
