"""Steps whose passes run over whatever shapes come, stage by stage from the host: the way of a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from draftwood.tree import DraftTree
from verify_service.cache.pages import SCRATCH_SLOT
from verify_service.core.sequence import SequenceState
from verify_service.cpu.commit import Committer
from verify_service.cpu.step_inputs import StepInputs, StepRow, build_step_inputs
from verify_service.cpu.target import PassOutputs, TreeTarget
from verify_service.cpu.warmup import WarmUp
from verify_service.model.features import RowProjection
from verify_service.model.shapes import padded
from verify_service.step.runner import Load, StepRunner
from verify_service.step.walk import SequenceTree, Walk


@dataclass(frozen=True, slots=True)
class Verified:
    """A pass over the trees of a batch."""

    outputs: PassOutputs
    logits: Tensor  # [B, N, vocab_size]


class PassRunner(StepRunner[StepInputs, Verified]):
    """All methods are called on the engine's thread."""

    target: TreeTarget

    def __init__(self, target: TreeTarget, committer: Committer, projection: RowProjection | None) -> None:
        super().__init__(target)
        self.target, self.committer, self.projection = target, committer, projection

    def warm_up(self, load: Load) -> None:
        WarmUp(self.target, self.committer, self.projection).run(load)

    def prefill(self, parts: Sequence[tuple[SequenceState, int]]) -> None:
        rows = [_prompt_row(sequence, length) for sequence, length in parts]
        outputs = self.target.run(self._inputs(rows))
        paths = [range(row.tree.num_nodes) for row in rows]
        self._commit([(i, s, path) for i, ((s, _), path) in enumerate(zip(parts, paths, strict=True))], outputs)
        for i, ((sequence, _), path) in enumerate(zip(parts, paths, strict=True)):
            self.note_prefilled(sequence, outputs.hidden[i, : len(path)])

    def build_inputs(self, batch: Sequence[SequenceTree]) -> StepInputs:
        return self._inputs(StepRow(tree, s.base_length, s.slots, s.state_slot) for s, tree in batch)

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

    def _inputs(self, rows: Iterable[StepRow]) -> StepInputs:
        return build_step_inputs(list(rows), kernel_size=self.target.spec.conv_kernel_size, scratch_slot=SCRATCH_SLOT)

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


def _prompt_row(sequence: SequenceState, length: int) -> StepRow:
    base = sequence.base_length
    part = sequence.request.prompt_token_ids[base : base + length]
    return StepRow(DraftTree.chain(part[0], part[1:]), base, sequence.slots, sequence.state_slot)


def _needs_features(sequence: SequenceState) -> bool:
    """A request without drafts does not; all others do, drafter or no drafter, for the one to come."""
    return sequence.request.algorithm != "none"
