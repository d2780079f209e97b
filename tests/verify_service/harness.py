"""The engine without sockets: requests in, events out, drafts from a function of the test's."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftwood.config import VerifyConfig
from draftwood.tree import DraftTree
from verify_service.build import build
from verify_service.core.events import Event, Failed, Finished, Started, TokenLogProbs, Tokens, Trace
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.core.stats import Stats
from verify_service.draft.coordinator import Drafts
from verify_service.engine.engine import Engine

Propose = Callable[[SequenceState], DraftTree | None]


class ScriptedDrafter:
    """Stands where the drafter stands and proposes what the test says."""

    def __init__(self, propose: Propose) -> None:
        self.propose = propose
        self.closed: list[int] = []  # what a drafter would know of
        self._ended: list[int] = []

    def draft(self, sequences: Sequence[SequenceState], traceparent: str = "") -> Drafts:
        self.flush()
        proposed = ((s, self.propose(s)) for s in sequences if s.wants_draft)
        return Drafts({s.sequence_id: tree for s, tree in proposed if tree is not None})

    def close(self, sequence: SequenceState) -> None:
        self._ended.append(sequence.sequence_id)

    def flush(self) -> None:
        self.closed, self._ended = [*self.closed, *self._ended], []


@dataclass
class Answer:
    """Everything one request sent."""

    tokens: list[int] = field(default_factory=list[int])
    chunks: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    log_probs: list[TokenLogProbs] = field(default_factory=list[TokenLogProbs])
    traces: list[Trace] = field(default_factory=list[Trace])
    prompt_log_probs: tuple[TokenLogProbs, ...] = ()
    end: Finished | Failed | None = None

    @property
    def stats(self) -> Stats:
        assert isinstance(self.end, Finished), self.end
        return self.end.stats


def start_engine(config: VerifyConfig, propose: Propose = lambda _: None) -> Engine:
    """An engine of the given configuration, running, with a scripted drafter."""
    engine = build(config).engine
    engine.coordinator = ScriptedDrafter(propose)  # pyright: ignore[reportAttributeAccessIssue]
    engine.start()
    return engine


def collect(events: queue.SimpleQueue[Event]) -> Answer:
    """Reads events up to the end."""
    answer = Answer()
    while answer.end is None:
        match events.get(timeout=300):  # compilers may come first
            case Started(prompt_log_probs):
                answer.prompt_log_probs = prompt_log_probs
            case Tokens(token_ids, log_probs, trace):
                answer.tokens += token_ids
                answer.chunks.append(token_ids)
                answer.log_probs += log_probs
                answer.traces += [trace] if trace is not None else []
            case Finished() | Failed() as end:
                answer.end = end
    return answer


def run_all(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """Decodes the requests together."""
    queues: list[queue.SimpleQueue[Event]] = []
    for request in requests:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        queues.append(events)
        engine.submit(request, events.put)
    return [collect(events) for events in queues]


def oracle_tree(
    rng: random.Random, root: int, truth: Sequence[int], vocab_size: int, *, depth: int, budget: int
) -> DraftTree:
    """A random tree that holds the first tokens of `truth` as one of its paths, wrong siblings everywhere, in shuffled
    (but topological) order."""
    token_ids, parents, depths = list[int](), list[int](), [0]
    good = 0  # node at the end of the true path so far
    taken: set[tuple[int, int]] = set()
    for _ in range(budget):
        node_depth = depths[good]
        if node_depth < min(depth, len(truth)) and rng.random() < 0.5:
            parent, token = good, truth[node_depth]
            is_good = True
        else:
            parent, token = rng.randrange(len(depths)), rng.randrange(vocab_size)
            on_truth = parent == good and node_depth < len(truth) and token == truth[node_depth]
            if on_truth or depths[parent] >= 15:
                continue
            is_good = False
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        token_ids.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        if is_good:
            good = len(depths) - 1
    return DraftTree.from_nodes(root, token_ids, parents, [-1.0] * len(token_ids))
