"""One step, and the passes over prompts before it: the work of the device loop, without its bookkeeping.

No draft is a tree with only the root, a linear draft a chain-shaped tree, a prompt's chunk a chain that is committed
whole: one code path.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from draftwood.errors import DraftwoodError
from draftwood.noise import NoiseCache
from draftwood.telemetry.metrics import STAGES
from draftwood.tree import DraftTree
from verify_service.cache.pools import reset_slot
from verify_service.core.accept import Finish
from verify_service.core.events import Failed, Finished, Started, Tokens, Trace
from verify_service.core.sequence import PREFILL_CHUNK, SequenceState
from verify_service.core.stats import SequenceStep, StageTimes
from verify_service.draft.coordinator import DraftCoordinator, Drafts
from verify_service.model.target import TargetModel
from verify_service.step.observer import StepObserver
from verify_service.step.sampler import finite_row, log_probs_of
from verify_service.step.shadow import union_of
from verify_service.step.walk import SequenceTree, Walk, walk_tree

log = logging.getLogger(__name__)

Inputs = TypeVar("Inputs")
Verified = TypeVar("Verified")


@dataclass(frozen=True, slots=True)
class Load:
    """What a runner has to be ready for."""

    max_batch: int
    tree_budget: int  # of usual trees
    max_tree_budget: int  # 0 where nothing will ever be drafted
    prefill_tokens: int  # of one pass over prompts


@contextmanager
def _stage(name: str, seconds: dict[str, float]) -> Generator[None]:
    """Adds the body's time to a stage; a step of several passes goes through some of them again."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - began


class StepRunner(ABC, Generic[Inputs, Verified]):
    """What does not depend on how passes run. All methods are called on the engine's thread, which alone changes the
    sequences that it hands in."""

    prefill_chunk = PREFILL_CHUNK  # tokens of one prompt in one pass at most

    def __init__(self, target: TargetModel) -> None:
        self.target, self.pools = target, target.pools
        self.noise = NoiseCache(target.spec.vocab_size)
        self.debug_steps = False
        self.observer = StepObserver()
        self._prefill_hidden: dict[int, Tensor] = {}

    def step(
        self, batch: Sequence[SequenceState], coordinator: DraftCoordinator
    ) -> list[tuple[SequenceState, Finished | Failed]]:
        """One step for the whole batch: draft, tree, verify, accept, commit. Returns the answers that ended, with their
        ends, which are not sent yet."""
        seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        with _stage("draft", seconds):
            drafts = coordinator.draft(batch, self.observer.begin(batch))
        pending = [SequenceTree(sequence, _tree_for(sequence, drafts)) for sequence in batch]
        walks: dict[int, tuple[DraftTree, Walk]] = {}  # by sequence id: what was verified, and what became of it
        while pending:
            part = pending[: self.num_together(pending)]
            with _stage("tree", seconds):
                inputs = self.build_inputs(part)
            with _stage("verify", seconds):
                verified = self.verify(part, inputs)
            with _stage("accept", seconds):
                part_walks = self.accept(part, verified)
            with _stage("commit", seconds):
                self.commit(part, part_walks, verified)
            del pending[: len(part)]
            for (sequence, tree), walk in zip(part, part_walks, strict=True):
                if walk.error is not None and tree.num_nodes > 1:
                    # A node that overflows reaches its siblings: masks are zeros, and zero times NaN is NaN. Nothing of
                    # this row was committed, so that the step is made again as if there were no draft.
                    pending.append(SequenceTree(sequence, DraftTree.root_only(sequence.root)))
                else:
                    walks[sequence.sequence_id] = tree, walk
        times = StageTimes(**seconds, drafter_busy=drafts.busy, transport=drafts.transport)
        return self._deliver_all([(s, *walks[s.sequence_id]) for s in batch], times)

    def num_together(self, pending: Sequence[SequenceTree]) -> int:
        """How many, from the first on, go into one pass together."""
        return len(pending)

    @abstractmethod
    def build_inputs(self, batch: Sequence[SequenceTree]) -> Inputs:
        """Positions, masks and windows of the trees, and whatever else a pass needs besides the weights."""

    @abstractmethod
    def verify(self, batch: Sequence[SequenceTree], inputs: Inputs) -> Verified:
        """The target's pass over all nodes. Where draws, walk and commit are part of its graph, it makes them, too."""

    @abstractmethod
    def accept(self, batch: Sequence[SequenceTree], verified: Verified) -> list[Walk]:
        """The target's draws, and the walks along them."""

    @abstractmethod
    def commit(self, batch: Sequence[SequenceTree], walks: Sequence[Walk], verified: Verified) -> None:
        """Makes the paths permanent of all whose answers go on, as far as the graph has not done so."""

    @abstractmethod
    def prefill(self, parts: Sequence[tuple[SequenceState, int]]) -> None:
        """Brings the next tokens of some prompts into the caches in one pass, so many of each."""

    @abstractmethod
    def warm_up(self, load: Load) -> None:
        """Runs what a first request would have to wait for: compilers, captures, memory. May be another thread's."""

    def admit(self, sequence: SequenceState) -> None:
        """Prepares the slots of a new sequence."""
        sequence.admitted_at = time.perf_counter()
        sequence.stats.queue_s = sequence.admitted_at - sequence.arrived_at
        sequence.stats.num_prompt_tokens = len(sequence.request.prompt_token_ids)
        reset_slot(self.pools, sequence.state_slot)

    def forget(self, sequence: SequenceState) -> None:
        """Drops what is kept of a sequence that ends, wherever it is."""
        self._prefill_hidden.pop(sequence.sequence_id, None)

    def note_prefilled(self, sequence: SequenceState, hidden: Tensor) -> None:
        """Takes note of a committed chunk: final hidden states [P, H] of its tokens."""
        if sequence.request.num_prompt_log_probs is not None:
            self._prompt_log_probs(sequence, hidden)
        sequence.base_length += hidden.shape[0]
        if sequence.is_prefilled:
            self._prefill_hidden[sequence.sequence_id] = hidden[-1:].clone()

    def first_token(self, sequence: SequenceState) -> Finished | Failed | None:
        """Draws the token after the prompt and sends it; returns the end where the answer ends with it."""
        hidden = self._prefill_hidden.pop(sequence.sequence_id)
        if sequence.error is not None:
            return Failed(sequence.error)
        # A tree whose root is the prompt's last token, which is committed already.
        entry = SequenceTree(sequence, DraftTree.root_only(sequence.request.prompt_token_ids[-1]))
        walk = walk_tree(entry, self.target.logits(hidden), self.noise, first_position=sequence.base_length)
        sequence.first_token_at = time.perf_counter()
        sequence.stats.prefill_s = sequence.first_token_at - sequence.admitted_at
        sequence.emit(Started(tuple(sequence.prompt_log_probs)))
        return self._deliver(sequence, walk, None)

    def walk(self, entry: SequenceTree, logits: Tensor) -> Walk:
        """The walk along the tree by the host's own draws, from logits [N, vocab_size]."""
        return walk_tree(entry, logits, self.noise, first_position=entry.sequence.base_length + 1)

    def _deliver_all(
        self, results: Sequence[tuple[SequenceState, DraftTree, Walk]], times: StageTimes
    ) -> list[tuple[SequenceState, Finished | Failed]]:
        """Counts the step, sends its tokens and moves the sequences on."""
        finished: list[tuple[SequenceState, Finished | Failed]] = []
        steps: list[SequenceStep] = []
        for sequence, tree, walk in results:
            num_accepted, num_shadow = len(walk.accepted.path) - 1, max(len(walk.shadow_path) - 1, 0)
            steps.append(SequenceStep(walk.tree, num_accepted, sequence.wants_draft, num_shadow))
            sequence.stats.add_step(steps[-1], times)
            trace = None
            if sequence.request.trace_steps or self.debug_steps:
                trace = Trace(sequence.base_length, tree, walk.accepted.path, times, walk.shadow_path)
            end = self._deliver(sequence, walk, trace)
            if end is not None:
                finished.append((sequence, end))
            else:
                sequence.base_length += len(walk.accepted.path)
            if trace is not None and self.debug_steps:
                _log_step(sequence, trace)
        self.observer.step(steps, times)
        return finished

    def _deliver(self, sequence: SequenceState, walk: Walk, trace: Trace | None) -> Finished | Failed | None:
        """Sends the tokens; returns the end where the answer ends, to be sent once everything is free."""
        accepted = walk.accepted
        if walk.error is not None:
            return Failed(walk.error)
        sequence.answer.extend(accepted.tokens)
        wanted = trace if sequence.request.trace_steps else None
        num_drafted = walk.tree.num_nodes - 1
        sequence.emit(Tokens(accepted.tokens, walk.log_probs, wanted, num_drafted, len(accepted.path) - 1))
        if accepted.finish is None:
            return None
        stats = sequence.stats
        stats.num_generated_tokens = len(sequence.answer)
        stats.decode_s = time.perf_counter() - sequence.first_token_at
        stop = accepted.tokens[-1] if accepted.finish is Finish.STOP else None
        return Finished(accepted.finish, stop, stats)

    def _prompt_log_probs(self, sequence: SequenceState, hidden: Tensor) -> None:
        """Log-probabilities of the prompt's tokens that this chunk's rows [P, H] predict."""
        prompt, num_top = sequence.request.prompt_token_ids, sequence.request.num_prompt_log_probs or 0
        positions = range(sequence.base_length + 1, len(prompt))  # the prompt's last token predicts none of it
        for logits, position in zip(self.target.logits(hidden), positions, strict=False):
            try:
                row = finite_row(logits, position)
            except DraftwoodError as error:
                sequence.error = sequence.error or error
            else:
                sequence.prompt_log_probs.append(log_probs_of(row, prompt[position], num_top))


AnyRunner = StepRunner[Any, Any]  # whatever its passes take and give


def _tree_for(sequence: SequenceState, drafts: Drafts) -> DraftTree:
    """The part of its draft that is verified; the root alone where there is no draft."""
    tree, request = drafts.trees.get(sequence.sequence_id), sequence.request
    if tree is None:
        return DraftTree.root_only(sequence.root)
    return union_of(tree, request.tree_budget) if request.shadow_linear else tree.prefix(request.tree_budget)


def _log_step(sequence: SequenceState, trace: Trace) -> None:
    log.info(
        "step %s nodes=%d depth=%d accepted=%d%s draft=%.2f tree=%.2f verify=%.2f accept=%.2f commit=%.2f ms",
        sequence.request.request_id,
        trace.tree.num_nodes - 1,
        trace.tree.max_depth,
        len(trace.path) - 1,
        f" tree_accepted={len(trace.shadow_path) - 1}" if trace.shadow_path else "",
        *(1e3 * seconds for seconds in trace.times[:5]),
    )
