"""Steps whose passes run over whatever shapes come, stage by stage from the host: the way of a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draftwood.tree import DraftTree
from verify_service.core.sequence import SequenceState
from verify_service.cpu.commit import Committer, RowProjection
from verify_service.cpu.step_inputs import StepInputs, StepRow, build_step_inputs, padded
from verify_service.cpu.target import PassOutputs, TreeTarget
from verify_service.cpu.warmup import WarmUp
from verify_service.model.features import FeatureProjector
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

    def __init__(self, target: TreeTarget, projector: FeatureProjector | None) -> None:
        super().__init__(target)
        compile_steps = target.is_compiled
        self.committer = Committer(target.pools, target.spec.recurrent, compile_steps=compile_steps)
        self.projection = RowProjection(projector, compile_steps=compile_steps) if projector else None

    def warm_up(self, load: Load) -> None:
        WarmUp(self.target, self.committer, self.projection).run(load)

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


def _prompt_chain(sequence: SequenceState, length: int) -> SequenceTree:
    base = sequence.base_length
    part = sequence.request.prompt_token_ids[base : base + length]
    return SequenceTree(sequence, DraftTree.chain(part[0], part[1:]))


def _needs_features(sequence: SequenceState) -> bool:
    """A request without drafts does not; all others do, drafter or no drafter, for the one to come."""
    return sequence.request.algorithm != "none"
