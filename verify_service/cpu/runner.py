"""A runner whose passes run over whatever shapes come, operator by operator: the CPU's."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from draftwood.tree import DraftTree
from verify_service.cache.pages import SCRATCH_SLOT
from verify_service.cache.pools import Pools
from verify_service.core.sequence import SequenceState
from verify_service.cpu.commit import Committer
from verify_service.cpu.step_inputs import StepRow, build_step_inputs
from verify_service.cpu.target import PassOutputs, TargetModel
from verify_service.model.features import RowProjection
from verify_service.model.shapes import padded
from verify_service.step.runner import Stages, StepRunner, Walk


class PassRunner(StepRunner):
    """Runs on the engine's thread."""

    def __init__(
        self, model: TargetModel, pools: Pools, committer: Committer, projection: RowProjection | None
    ) -> None:
        super().__init__(model, pools)
        self.model, self.committer, self.projection = model, committer, projection

    def prefill(self, parts: Sequence[tuple[SequenceState, int]]) -> None:
        batch = [sequence for sequence, _ in parts]
        rows = [self._prompt_row(sequence, length) for sequence, length in parts]
        outputs = self.model.run(
            build_step_inputs(rows, kernel_size=self.model.spec.conv_kernel_size, scratch_slot=SCRATCH_SLOT), self.pools
        )
        paths = [range(row.tree.num_nodes) for row in rows]
        self._commit(list(zip(range(len(batch)), batch, paths, strict=True)), outputs)
        for i, (sequence, path) in enumerate(zip(batch, paths, strict=True)):
            self._prefilled(sequence, outputs.hidden[i, : len(path)])

    def _prompt_row(self, sequence: SequenceState, length: int) -> StepRow:
        base = sequence.base_length
        part = sequence.request.prompt_token_ids[base : base + length]
        return StepRow(DraftTree.chain(part[0], part[1:]), base, sequence.slots, sequence.state_slot)

    def _verify(
        self, batch: Sequence[SequenceState], trees: Sequence[DraftTree], started: float
    ) -> tuple[list[Walk], Stages]:
        rows = [StepRow(t, s.base_length, s.slots, s.state_slot) for t, s in zip(trees, batch, strict=True)]
        inputs = build_step_inputs(rows, kernel_size=self.model.spec.conv_kernel_size, scratch_slot=SCRATCH_SLOT)
        t1 = time.perf_counter()
        outputs = self.model.run(inputs, self.pools, with_features=any(_needs_features(s) for s in batch))
        logits = self.model.logits(outputs.hidden[:, : padded(max(t.num_nodes for t in trees))])
        t2 = time.perf_counter()
        walks = [self._walk(s, t, logits[i]) for i, (s, t) in enumerate(zip(batch, trees, strict=True))]
        t3 = time.perf_counter()
        parts = ((i, s, w) for i, (s, w) in enumerate(zip(batch, walks, strict=True)))
        self._commit([(i, s, w.accepted.path) for i, s, w in parts if w.goes_on], outputs)
        t4 = time.perf_counter()
        return walks, (t1 - started, t2 - t1, t3 - t2, t4 - t3)

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
        target_features = outputs.target_features
        if self.projection is None or target_features is None or not paths:
            return {}
        index = [row * target_features.shape[1] + node for row, path in paths.items() for node in path]
        rows = self.projection(target_features.flatten(0, 1), index).split([len(path) for path in paths.values()])
        return dict(zip(paths, rows, strict=True))


def _needs_features(sequence: SequenceState) -> bool:
    """A request without drafts does not; all others do, drafter or no drafter, for the one to come."""
    return sequence.request.algorithm != "none"
