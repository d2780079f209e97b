"""Prefill chunks and decode steps over the target model: the work of the device loop, without its bookkeeping.

No draft is a tree with only the root, a linear draft a chain-shaped tree, a prompt's chunk a chain that is committed
whole: one code path.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from draftwood.errors import DraftwoodError
from draftwood.noise import NoiseCache
from draftwood.tree import DraftTree
from verify_service.cache.pools import Pools, reset_slot
from verify_service.core.accept import Accepted, Finish, accept
from verify_service.core.events import Failed, Finished, Started, TokenLogProbs, Tokens, Trace
from verify_service.core.sequence import PREFILL_CHUNK, SequenceState
from verify_service.core.stats import StageTimes
from verify_service.core.target_spec import TargetSpec
from verify_service.draft.coordinator import DraftCoordinator, Drafts
from verify_service.step.sampler import NodeSampler, check_finite, log_probs_of, logits_row
from verify_service.step.shadow import chain_of, tree_of, union_of
from verify_service.step.step_stats import SequenceStep, StepObserver

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Walk:
    """What became of one sequence's tree."""

    tree: DraftTree  # what was walked: in shadow-linear mode the chain
    accepted: Accepted
    log_probs: tuple[TokenLogProbs, ...]
    shadow_path: tuple[int, ...] = ()  # nodes of the verified tree
    error: DraftwoodError | None = None  # what ends the request instead

    @property
    def goes_on(self) -> bool:
        """Whether the answer does, so that the path is committed."""
        return self.accepted.finish is None and self.error is None


Stages = tuple[float, float, float, float]  # seconds of tree, verify, accept and commit


class Logits(Protocol):
    """A target model, as far as every runner knows it."""

    spec: TargetSpec

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., vocabulary]."""
        ...


class StepRunner(ABC):
    """What does not depend on how passes run. Runs on the engine's thread."""

    prefill_chunk = PREFILL_CHUNK  # tokens of one prompt in one pass at most

    def __init__(self, model: Logits, pools: Pools) -> None:
        self.target, self.pools = model, pools
        self.noise = NoiseCache(model.spec.vocab_size)
        self.debug_steps = False
        self.observer = StepObserver()
        self._prefill_hidden: dict[int, Tensor] = {}

    def admit(self, sequence: SequenceState) -> None:
        """Prepares the slots of a new sequence."""
        sequence.admitted_at = time.perf_counter()
        sequence.stats.queue_s = sequence.admitted_at - sequence.arrived_at
        sequence.stats.num_prompt_tokens = len(sequence.request.prompt_token_ids)
        reset_slot(self.pools, sequence.state_slot)

    def forget(self, sequence: SequenceState) -> None:
        """Drops what is kept of a sequence that ends, wherever it is."""
        self._prefill_hidden.pop(sequence.sequence_id, None)

    @abstractmethod
    def prefill(self, parts: Sequence[tuple[SequenceState, int]]) -> None:
        """Brings the next tokens of some prompts into the caches in one pass, so many of each."""

    @abstractmethod
    def _verify(
        self, batch: Sequence[SequenceState], trees: Sequence[DraftTree], started: float
    ) -> tuple[list[Walk], Stages]:
        """Verifies the trees, walks them and commits what was accepted; the times of these stages."""

    def _prefilled(self, sequence: SequenceState, hidden: Tensor) -> None:
        """Takes note of a committed chunk: final hidden states [P, H] of its tokens."""
        if sequence.request.num_prompt_log_probs is not None:
            self._prompt_log_probs(sequence, sequence.base_length, hidden)
        sequence.base_length += hidden.shape[0]
        if sequence.is_prefilled:
            self._prefill_hidden[sequence.sequence_id] = hidden[-1:].clone()

    def first_token(self, sequence: SequenceState) -> Finished | Failed | None:
        """Draws the token after the prompt and sends it; returns the end where the answer ends with it."""
        hidden = self._prefill_hidden.pop(sequence.sequence_id)
        if sequence.error is not None:
            return Failed(sequence.error)
        # A tree whose root is the prompt's last token, already committed: the draw's position is base_length.
        tree = DraftTree.root_only(sequence.request.prompt_token_ids[-1])
        sequence.base_length -= 1
        walk = self._walk(sequence, tree, self.target.logits(hidden))
        sequence.base_length += 1
        now = time.perf_counter()
        sequence.first_token_at = now
        sequence.stats.prefill_s = now - sequence.admitted_at
        sequence.emit(Started(tuple(sequence.prompt_log_probs)))
        return self._deliver(sequence, walk, None)

    def step(
        self, batch: Sequence[SequenceState], drafter: DraftCoordinator
    ) -> list[tuple[SequenceState, Finished | Failed]]:
        """One step for the whole batch; returns the answers that ended, not yet sent."""
        drafts = drafter.draft(batch, self.observer.begin(batch))
        started = time.perf_counter()
        trees = [self._tree(sequence, drafts) for sequence in batch]
        walks, (tree_s, verify_s, accept_s, commit_s) = self._verify(batch, trees, started)
        for i, (sequence, walk) in enumerate(zip(batch, walks, strict=True)):
            if walk.error is not None and trees[i].num_nodes > 1:
                # A node that overflows reaches its siblings: masks are zeros, and zero times NaN is NaN. Nothing of
                # this row was committed, so the step is made again as if there were no draft.
                trees[i] = DraftTree.root_only(sequence.root)
                (walks[i],), _ = self._verify([sequence], trees[i : i + 1], time.perf_counter())
        times = StageTimes(
            draft=drafts.wait,
            tree=tree_s,
            verify=verify_s,
            accept=accept_s,
            commit=commit_s,
            drafter_busy=drafts.busy,
            transport=drafts.transport,
        )
        finished: list[tuple[SequenceState, Finished | Failed]] = []
        steps: list[SequenceStep] = []
        for sequence, tree, walk in zip(batch, trees, walks, strict=True):
            is_drafted, num_accepted = tree.num_nodes > 1, len(walk.accepted.path) - 1
            num_shadow = max(len(walk.shadow_path) - 1, 0)
            steps.append(SequenceStep(walk.tree, num_accepted, sequence.wants_draft, num_shadow))
            sequence.stats.add_step(walk.tree, num_accepted, wanted_draft=sequence.wants_draft)
            sequence.stats.num_shadow_accepted += num_shadow
            sequence.stats.add_times(times, drafted=is_drafted)
            trace = None
            if sequence.request.trace_steps or self.debug_steps:
                trace = Trace(sequence.base_length, tree, walk.accepted.path, times, walk.shadow_path)
            end = self._deliver(sequence, walk, trace)
            if end is not None:
                finished.append((sequence, end))
            else:
                sequence.base_length += len(walk.accepted.path)
            if trace is not None and self.debug_steps:
                self._log_step(sequence, trace)
        self.observer.step(steps, times)
        return finished

    def _tree(self, sequence: SequenceState, drafts: Drafts) -> DraftTree:
        tree, request = drafts.trees.get(sequence.sequence_id), sequence.request
        if tree is None:
            return DraftTree.root_only(sequence.root)
        return union_of(tree, request.tree_budget) if request.shadow_linear else tree.prefix(request.tree_budget)

    def _walk(self, sequence: SequenceState, tree: DraftTree, logits: Tensor) -> Walk:
        """The walk along the tree; a sequence that cannot be drawn for does not keep others from theirs."""
        try:
            return self._drawn_walk(sequence, tree, logits)
        except DraftwoodError as error:
            log.warning("request %s: %s", sequence.request.request_id, error.message)
            return Walk(tree, Accepted((0,), (), None), (), error=error)

    def _drawn_walk(self, sequence: SequenceState, tree: DraftTree, logits: Tensor) -> Walk:
        request = sequence.request
        draws = NodeSampler(sequence, tree, logits, request.stop_token_ids, self.noise)

        def walk(part: DraftTree, draw: Callable[[int], int]) -> Accepted:
            return accept(part, draw, stop_token_ids=request.stop_token_ids, max_tokens=max(sequence.num_remaining, 1))

        if not (request.shadow_linear and tree.num_nodes > 1):
            return Walk(tree, walk(tree, draws), tuple(draws.log_probs))
        chain, (shadow, nodes) = chain_of(tree, request.tree_budget), tree_of(tree, request.tree_budget)
        accepted = walk(chain, draws)
        log_probs = tuple(draws.log_probs)
        path = walk(shadow, lambda node: draws(nodes[node])).path
        return Walk(chain, accepted, log_probs, tuple(nodes[node] for node in path))

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

    def _prompt_log_probs(self, sequence: SequenceState, base: int, hidden: Tensor) -> None:
        """Log-probabilities of the prompt's tokens that this chunk's rows predict."""
        prompt, num_top = sequence.request.prompt_token_ids, sequence.request.num_prompt_log_probs or 0
        logits = self.target.logits(hidden)
        for i in range(hidden.shape[0]):
            position = base + i + 1
            if position < len(prompt):
                row = logits_row(logits[i])
                try:
                    check_finite(row, position)
                except DraftwoodError as error:
                    sequence.error = sequence.error or error
                else:
                    sequence.prompt_log_probs.append(log_probs_of(row, prompt[position], num_top))

    def _log_step(self, sequence: SequenceState, trace: Trace) -> None:
        times = trace.times
        log.info(
            "step %s nodes=%d depth=%d accepted=%d%s draft=%.2f tree=%.2f verify=%.2f accept=%.2f commit=%.2f ms",
            sequence.request.request_id,
            trace.tree.num_nodes - 1,
            trace.tree.max_depth,
            len(trace.path) - 1,
            f" tree_accepted={len(trace.shadow_path) - 1}" if trace.shadow_path else "",
            *(1e3 * t for t in (times.draft, times.tree, times.verify, times.accept, times.commit)),
        )
