"""Steps over static buffers: a step is one graph launch and one small read-back, the way of a GPU.

Verify, accept and commit are one graph. Rows whose draws need more than the device's sampler knows take a slower way:
the graph stops before the commit, the host draws for them from their logits, and a second graph commits what was
accepted of all rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from draftwood.device.graphs import Graphs, bucket
from draftwood.errors import InternalError
from draftwood.tree import DraftTree
from verify_service.cache.commit_inputs import Arena
from verify_service.core.accept import Accepted
from verify_service.core.sequence import SequenceState
from verify_service.gpu.buffers import RowTable, StepBuffers
from verify_service.gpu.memory import NODES, PROMPT_NODES, PassLimits, node_bucket
from verify_service.gpu.step_graphs import StepGraphs
from verify_service.gpu.target import GraphTarget
from verify_service.kernels.arguments import FINISHES, MAX_STOP_IDS, NO_DRAW
from verify_service.model.features import FeatureProjector
from verify_service.step.runner import Load, StepRunner
from verify_service.step.walk import SequenceTree, Walk

log = logging.getLogger(__name__)

MAX_PATH = 16  # accepted nodes of a step; a longer walk goes on in the next one


@dataclass(frozen=True, slots=True)
class StepPass:
    """One pass over a batch: the graphs of its bucket, with their inputs written."""

    graphs: StepGraphs
    rows: list[int]  # of the batch's sequences
    has_filters: bool  # whether a row's draws are filtered
    on_host: list[bool]  # for each sequence, whether the host draws


class GraphRunner(StepRunner[StepPass, StepPass]):
    """All methods are called on the engine's thread; the warm-up before that, on another."""

    def __init__(
        self, target: GraphTarget, projector: FeatureProjector | None, capture: Graphs, limits: PassLimits
    ) -> None:
        super().__init__(target)
        self.target, self.projector, self.capture, self.limits = target, projector, capture, limits
        # In float32 the products of longer chains want more shared memory than there is.
        self.prefill_chunk = PROMPT_NODES[-1] if target.dtype.itemsize == 2 else PROMPT_NODES[-2]
        spec, dtype, device = target.spec, target.dtype, target.device
        self.arena = Arena(spec, limits.passed_nodes, dtype=dtype, device=device)
        self.hidden = torch.zeros(limits.passed_nodes, spec.hidden_size, dtype=dtype, device=device)
        self.logits = torch.zeros(limits.drawn_nodes, spec.vocab_size, dtype=dtype, device=device)
        num_rows, num_pages = bucket(limits.max_batch), -(-target.max_context // target.page_size)
        self.rows, self._prompt_rows = (RowTable(num_rows, num_pages, device) for _ in range(2))
        self._graphs: dict[tuple[str, int, int], StepGraphs] = {}
        self._arrived = torch.cuda.Event() if target.device.type == "cuda" else None

    def graphs_of(self, kind: str, b: int, n: int) -> StepGraphs:
        """The graphs of a bucket, made when they are first asked for; `kind` is "step" or "prompt"."""
        graphs = self._graphs.get((kind, b, n))
        if graphs is None:
            is_step = kind == "step"
            rows, max_path = (self.rows, min(n, MAX_PATH)) if is_step else (self._prompt_rows, n)
            buffers = StepBuffers(b, n, arena=self.arena, hidden=self.hidden, page_table=rows.pages, max_path=max_path)
            logits = self.logits[: b * n] if is_step else self.logits[:0]
            graphs = StepGraphs(self.target, buffers, logits, self.projector, self.capture)
            self._graphs[(kind, b, n)] = graphs
        return graphs

    @torch.inference_mode()
    def warm_up(self, load: Load) -> None:
        """Runs every graph over spare rows; those of trees only where trees may come."""
        started = time.perf_counter()
        batches = [1 << i for i in range(bucket(self.limits.max_batch).bit_length())]
        max_nodes = node_bucket(self.limits.max_nodes) if load.max_tree_budget else 1
        shapes = [(b, n) for b in reversed(batches) for n in reversed(NODES) if n <= max_nodes]
        for number, (b, n) in enumerate(shapes, start=1):
            log.info("preparing step %d of %d: %d rows of %d nodes", number, len(shapes), b, n)
            graphs = self.graphs_of("step", b, n)
            graphs.buffers.clear()
            graphs.step(has_filters=False)
            if n == 1 or number == 1:
                graphs.step(has_filters=True)
        for n in (n for n in PROMPT_NODES if n <= self.prefill_chunk):
            graphs = self.graphs_of("prompt", 1, n)
            graphs.buffers.clear()
            graphs.prefill()
            graphs.commit()
        self._wait()
        log.info("steps are ready after %.0f s", time.perf_counter() - started)

    def prefill(self, parts: Sequence[tuple[SequenceState, int]]) -> None:
        pending = list(parts)
        while pending:
            count = _num_fitting([length for _, length in pending], PROMPT_NODES, self.arena.num_nodes)
            group, pending = pending[:count], pending[count:]
            b, n = bucket(len(group)), node_bucket(max(length for _, length in group), PROMPT_NODES)
            graphs = self.graphs_of("prompt", b, n)
            buffers = graphs.buffers
            buffers.clear()
            result = buffers.result.host
            result["path"][:] = np.arange(n)
            rows = self._prompt_rows.place([sequence for sequence, _ in group])
            for row, (sequence, length) in zip(rows, group, strict=True):
                base = sequence.base_length
                part = sequence.request.prompt_token_ids[base : base + length]
                buffers.write_tree(row, base, part, range(-1, length - 1))
                buffers.inputs.host["state_slots"][row] = sequence.state_slot
                result["path_length"][row] = length
            graphs.prefill()
            graphs.commit()
            for row, (sequence, length) in zip(rows, group, strict=True):
                self.note_prefilled(sequence, buffers.hidden[row, :length])
            self._wait()  # the host writes into the same memory for the next pass

    def num_together(self, pending: Sequence[SequenceTree]) -> int:
        nodes = [entry.tree.num_nodes for entry in pending]
        return _num_fitting(nodes, NODES, self.logits.shape[0])

    def build_inputs(self, batch: Sequence[SequenceTree]) -> StepPass:
        b, n = bucket(len(batch)), node_bucket(max(tree.num_nodes for _, tree in batch))
        graphs = self.graphs_of("step", b, n)
        rows = self.rows.place([sequence for sequence, _ in batch])
        has_filters = graphs.buffers.write_step(rows, batch)
        return StepPass(graphs, rows, has_filters, [_needs_host(entry) for entry in batch])

    def verify(self, batch: Sequence[SequenceTree], inputs: StepPass) -> StepPass:
        """Where no row needs the host, the same graph draws, walks and commits."""
        del batch
        graphs = inputs.graphs
        (graphs.verify if any(inputs.on_host) else graphs.step)(has_filters=inputs.has_filters)
        self._wait()
        return inputs

    def accept(self, batch: Sequence[SequenceTree], verified: StepPass) -> list[Walk]:
        """Reads the device's walks, and makes those that are the host's."""
        walks: list[Walk] = []
        result = verified.graphs.buffers.result.host
        for entry, row, is_host in zip(batch, verified.rows, verified.on_host, strict=True):
            if is_host:
                walks.append(self._host_walk(verified.graphs, row, entry))
            elif result["finish"][row] == NO_DRAW:
                walks.append(self._broken_walk(verified.graphs, row, entry))
            else:
                walks.append(_read(result, row, entry.tree))
        return walks

    def commit(self, batch: Sequence[SequenceTree], walks: Sequence[Walk], verified: StepPass) -> None:
        """What `accept` has written down for the host's rows and the device for all others, unless it is done."""
        del batch, walks
        if any(verified.on_host):
            verified.graphs.commit()
            self._wait()

    def _host_walk(self, graphs: StepGraphs, row: int, entry: SequenceTree) -> Walk:
        """The walk by the host's own draws, written down for the commit."""
        walk = self.walk(entry, graphs.logits[row])
        limit, accepted = graphs.buffers.max_path, walk.accepted
        if len(accepted.path) > limit:
            accepted = Accepted(accepted.path[:limit], accepted.tokens[:limit], None)
            walk = Walk(walk.tree, accepted, walk.log_probs[:limit], walk.shadow_path)
        result = graphs.buffers.result.host
        result["path_length"][row] = len(accepted.path) if walk.goes_on else 0
        result["path"][row, : len(accepted.path)] = accepted.path
        return walk

    def _broken_walk(self, graphs: StepGraphs, row: int, entry: SequenceTree) -> Walk:
        """A walk to a node without a draw, by the host, which says what is wrong there."""
        walk = self.walk(entry, graphs.logits[row])
        return replace(walk, error=walk.error or InternalError("the device found no draw where the host finds one"))

    def _wait(self) -> None:
        """Until the device has done everything so far."""
        if self._arrived is not None:
            self._arrived.record()
            self._arrived.synchronize()


def _num_fitting(nodes: Sequence[int], sizes: tuple[int, ...], limit: int) -> int:
    """How many trees of so many nodes, from the first on, are at most `limit` nodes once all are padded; mostly all."""
    if bucket(len(nodes)) * node_bucket(max(nodes), sizes) <= limit:
        return len(nodes)
    count = 1
    while bucket(count + 1) * node_bucket(max(nodes[: count + 1]), sizes) <= limit:
        count += 1
    return count


def _needs_host(entry: SequenceTree) -> bool:
    """Whether the draws need what the device's sampler does not do."""
    sequence, tree = entry
    request = sequence.request
    return bool(
        request.sampling.has_penalties
        or request.sampling.logit_bias
        or request.num_log_probs is not None
        or len(sequence.answer) < request.min_new_tokens
        or (request.shadow_linear and tree.num_nodes > 1)
        or len(request.stop_token_ids) > MAX_STOP_IDS
    )


def _read(result: dict[str, Any], row: int, tree: DraftTree) -> Walk:
    """The device's walk of a row."""
    finish = FINISHES[result["finish"][row]]
    tokens = result["tokens"][row]
    count = int(result["path_length"][row]) if finish is None else int((tokens >= 0).sum())
    path = tuple(result["path"][row, :count].tolist())
    return Walk(tree, Accepted(path, tuple(tokens[:count].tolist()), finish), ())
