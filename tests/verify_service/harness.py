"""The verify service without sockets, in two ways: its engine as it runs, requests in and events out, or its runner
alone, step by step with a look into the pools. Drafts come from the test."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwood.config import VerifyConfig
from draftwood.tree import DraftTree
from verify_service.build import build
from verify_service.cache.pools import Pools
from verify_service.core.events import Event, Failed, Finished, Started, TokenLogProbs, Tokens, Trace
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.core.stats import Stats
from verify_service.cpu.step_inputs import StepInputs, StepRow, build_step_inputs
from verify_service.cpu.target import CommitInputs
from verify_service.draft.coordinator import Drafts
from verify_service.engine.engine import Engine
from verify_service.kernels.kernel_set import KernelSet

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


def config_of(target: Path | str, **changes: Any) -> VerifyConfig:
    """float32, one thread, not compiled."""
    values: dict[str, Any] = {
        "target": str(target),
        "draft": "none",
        "drafter": "none",
        "dtype": "float32",
        "compile": False,
        "threads": 1,
        "max_batch": 4,
        "page_size": 4,
    }
    return VerifyConfig(**(values | changes))


class SteppedRunner:
    """A built service's runner, driven step by step."""

    def __init__(self, config: VerifyConfig, kernels: KernelSet | None = None) -> None:
        self.service = build(config, kernels=kernels)
        self.engine = self.service.engine
        self.runner: Any = self.engine.runner  # a PassRunner, or with kernels a GraphRunner
        self.scheduler = self.engine.scheduler
        self.pools: Pools = self.runner.pools
        self.last_stash: CommitInputs | None = None  # the model's own buffers
        self._next_id = 0

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int], new_tokens: int, chunk: int = 64, **settings: Any) -> SequenceState:
        """Admits and prefills a sequence and draws its first token."""
        sequence = self.admit(prompt, new_tokens, **settings)
        while not sequence.is_prefilled:
            self.runner.prefill([(sequence, min(chunk, sequence.num_to_prefill))])
        assert self.runner.first_token(sequence) is None
        return sequence

    @torch.inference_mode()
    def admit(self, prompt: Sequence[int], new_tokens: int, **settings: Any) -> SequenceState:
        """Admits a sequence."""
        self._next_id += 1
        request = Request(request_id="r", prompt_token_ids=tuple(prompt), max_new_tokens=new_tokens, **settings)
        sequence = SequenceState(self._next_id, request, _drop, time.perf_counter())
        self.scheduler.enqueue(sequence)
        assert self.scheduler.admit() == [sequence]
        self.runner.admit(sequence)
        return sequence

    @torch.inference_mode()
    def step(self, batch: Sequence[SequenceState], trees: dict[int, DraftTree]) -> list[Finished]:
        """One step with the given trees by sequence id."""
        drafter: Any = ScriptedDrafter(lambda s: trees.get(s.sequence_id))
        return [end for _, end in self.runner.step(batch, drafter)]

    @torch.inference_mode()
    def decode(self, sequence: SequenceState, base_length: int) -> None:
        """One token at a time until `base_length` tokens are committed."""
        while sequence.base_length < base_length:
            assert self.step([sequence], {}) == []

    def end(self, sequence: SequenceState) -> None:
        """Frees a sequence."""
        self.scheduler.remove(sequence)

    def build_step_inputs(self, rows: Sequence[StepRow]) -> StepInputs:
        """Inputs of a pass over the rows."""
        return build_step_inputs(rows, kernel_size=self.runner.target.spec.conv_kernel_size)

    @torch.inference_mode()
    def record(self, sequence: SequenceState, tree: DraftTree) -> CommitInputs:
        """What a pass over the tree would commit, for one sequence; nothing is committed."""
        row = StepRow(tree, sequence.base_length, sequence.slots, sequence.state_slot)
        commit_inputs = self.last_stash = self.runner.target.run(self.build_step_inputs([row])).commit_inputs
        return CommitInputs(**{name: buffer.clone() for name, buffer in buffers(commit_inputs).items()})

    def committed(self, sequence: SequenceState) -> dict[str, Tensor]:
        """Copies of everything that is committed of a sequence, by name."""
        rows = torch.from_numpy(sequence.slots[: sequence.base_length])
        return {
            "states": self.pools.states[:, sequence.state_slot].clone(),
            "windows": self.pools.windows[:, sequence.state_slot].clone(),
            "keys": self.pools.keys[:, :, rows].clone(),
            "values": self.pools.values[:, :, rows].clone(),
            "features": self.pools.features[rows].clone(),
        }


def buffers(commit_inputs: CommitInputs) -> dict[str, Tensor]:
    """The buffers by name."""
    return {spec.name: getattr(commit_inputs, spec.name) for spec in fields(commit_inputs)}


def _drop(event: Event) -> None:
    """Nobody listens."""
    del event
