"""A decoder whose passes run over whatever shapes come, operator by operator: the CPU's."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch

from draftwood.tree import DraftTree
from verify_service.cache.pages import SCRATCH_SLOT
from verify_service.cache.pools import Pools
from verify_service.commit import Committer
from verify_service.decoder import Decoder, Stages, Walk
from verify_service.features import FeatureProjector
from verify_service.sequence import Sequence
from verify_service.step import StepRow, derive
from verify_service.target.model import PassOutputs, TargetModel


class PassDecoder(Decoder):
    """Runs on the engine's thread."""

    def __init__(
        self, model: TargetModel, pools: Pools, committer: Committer, projector: FeatureProjector | None
    ) -> None:
        super().__init__(model, pools)
        self.model, self.committer, self.projector = model, committer, projector

    def prefill(self, parts: Seq[tuple[Sequence, int]]) -> None:
        batch = [sequence for sequence, _ in parts]
        rows = [self._prompt_row(sequence, length) for sequence, length in parts]
        outputs = self.model.run(derive(rows, taps=self.model.spec.taps, scratch_slot=SCRATCH_SLOT), self.pools)
        for i, (sequence, row) in enumerate(zip(batch, rows, strict=True)):
            num_tokens = row.tree.num_nodes
            self._commit(sequence, i, tuple(range(num_tokens)), outputs)
            self._prefilled(sequence, outputs.hidden[i, :num_tokens])

    def _prompt_row(self, sequence: Sequence, length: int) -> StepRow:
        base = sequence.base_length
        part = sequence.request.prompt[base : base + length]
        return StepRow(DraftTree.chain(part[0], part[1:]), base, sequence.slots, sequence.state_slot)

    def _verify(self, batch: Seq[Sequence], trees: Seq[DraftTree], started: float) -> tuple[list[Walk], Stages]:
        rows = [StepRow(t, s.base_length, s.slots, s.state_slot) for t, s in zip(trees, batch, strict=True)]
        inputs = derive(rows, taps=self.model.spec.taps, scratch_slot=SCRATCH_SLOT)
        t1 = time.perf_counter()
        outputs = self.model.run(inputs, self.pools)
        logits = self.model.logits(outputs.hidden[:, : max(t.num_nodes for t in trees)])
        t2 = time.perf_counter()
        walks = [self._walk(s, t, logits[i]) for i, (s, t) in enumerate(zip(batch, trees, strict=True))]
        t3 = time.perf_counter()
        for i, (sequence, walk) in enumerate(zip(batch, walks, strict=True)):
            if walk.goes_on:
                self._commit(sequence, i, walk.accepted.path, outputs)
        t4 = time.perf_counter()
        return walks, (t1 - started, t2 - t1, t3 - t2, t4 - t3)

    def _commit(self, sequence: Sequence, row: int, path: tuple[int, ...], outputs: PassOutputs) -> None:
        features = None
        # A request without drafts needs no rows; all others have them, drafter or no drafter, for the one to come.
        if self.projector is not None and outputs.taps is not None and sequence.request.algorithm != "none":
            taps = outputs.taps[row]
            if len(path) != taps.shape[0]:
                taps = taps.index_select(0, torch.tensor(path))
            features = self.projector.project(taps)
        base = sequence.base_length
        slots = sequence.slots[base : base + len(path)]
        self.committer.commit(outputs.stash, row, path, slots, sequence.state_slot, features)
