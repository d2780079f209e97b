"""The runner over static buffers: a step is one graph launch and one small read-back.

Rows whose draws need more than the device's sampler knows take a slower way: the graph stops before the commit, the
host draws for them from their logits, and a second graph commits what was accepted of all rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from draftwood.device.graphs import Graphs, bucket
from draftwood.errors import InternalError
from draftwood.tree import DraftTree
from verify_service.cache.commit_inputs import Arena
from verify_service.core.accept import Accepted
from verify_service.core.sequence import SequenceState
from verify_service.gpu.buffers import StepBuffers
from verify_service.gpu.host_inputs import HostInputs, write_tree
from verify_service.gpu.memory import NODES, PROMPT_NODES, drawn_nodes, node_bucket, passed_nodes
from verify_service.gpu.row_table import RowTable
from verify_service.gpu.step_graphs import StepGraphs
from verify_service.gpu.target import GraphTarget
from verify_service.kernels.arguments import FINISHES, MAX_STOP_IDS, NO_DRAW
from verify_service.model.features import FeatureProjector
from verify_service.step.runner import Stages, StepRunner, Walk

log = logging.getLogger(__name__)

MAX_PATH = 16  # accepted nodes a step; a longer walk goes on in the next one


class GraphRunner(StepRunner):
    """Runs on the engine's thread, its warm-up before that on another."""

    def __init__(
        self,
        target: GraphTarget,
        projector: FeatureProjector | None,
        graphs: Graphs,
        *,
        max_batch: int,
        max_nodes: int,
        max_context: int,
        prefill_tokens: int,
    ) -> None:
        """`max_nodes` of the largest tree that a request may ask for; `prefill_tokens` of one pass over prompts."""
        super().__init__(target, target.pools)
        self.model, self.projector, self.graphs = target, projector, graphs
        self.max_batch, self.max_nodes = max_batch, node_bucket(max_nodes)
        # In float32 the products of longer chains want more shared memory than there is.
        self.prefill_chunk = PROMPT_NODES[-1] if target.dtype.itemsize == 2 else PROMPT_NODES[-2]
        num_nodes = passed_nodes(max_batch, max_nodes, prefill_tokens)
        self.arena = Arena(target.spec, num_nodes, dtype=target.dtype, device=target.device)
        vocab = target.spec.vocab_size
        num_drawn = drawn_nodes(max_batch, max_nodes)
        self.logits = torch.zeros(num_drawn, vocab, dtype=target.dtype, device=target.device)
        num_pages = -(-max_context // target.page_size)
        self.rows = RowTable(bucket(max_batch), num_pages, target.device)
        self._prompt_rows = RowTable(bucket(max_batch), num_pages, target.device)
        self._inputs: dict[StepGraphs, HostInputs] = {}
        self._programs: dict[tuple[str, int, int], StepGraphs] = {}
        self._arrived = torch.cuda.Event() if target.device.type == "cuda" else None

    def program(self, kind: str, b: int, n: int) -> StepGraphs:
        """The program of a bucket, made when it is first asked for; `kind` is "step" or "prompt"."""
        program = self._programs.get((kind, b, n))
        if program is None:
            is_step = kind == "step"
            rows, max_path = (self.rows, min(n, MAX_PATH)) if is_step else (self._prompt_rows, n)
            buffers = StepBuffers(b, n, arena=self.arena, page_table=rows.pages, max_path=max_path)
            logits = self.logits[: b * n] if is_step else self.logits[:0]
            program = StepGraphs(self.model, buffers, logits, self.projector, self.graphs)
            self._programs[(kind, b, n)] = program
        return program

    def inputs_of(self, program: StepGraphs) -> HostInputs:
        """The host's part of a program's steps."""
        inputs = self._inputs.get(program)
        if inputs is None:
            inputs = self._inputs[program] = HostInputs(program.buffers)
        return inputs

    @torch.inference_mode()
    def warm_up(self, *, has_trees: bool) -> None:
        """Runs every program over spare rows, so that no request pays for compilation and capture; those of trees only
        where trees may come."""
        batches = [1 << i for i in range(bucket(self.max_batch).bit_length())]
        started = time.perf_counter()
        shapes = [
            (b, n) for b in reversed(batches) for n in reversed(NODES) if n <= (self.max_nodes if has_trees else 1)
        ]
        for number, (b, n) in enumerate(shapes, start=1):
            log.info("preparing step %d of %d: %d rows of %d nodes", number, len(shapes), b, n)
            program = self.program("step", b, n)
            program.buffers.clear()
            program.step(has_filters=False)
            if n == 1 or number == 1:
                program.step(has_filters=True)
        for n in (n for n in PROMPT_NODES if n <= self.prefill_chunk):
            program = self.program("prompt", 1, n)
            program.buffers.clear()
            program.prefill()
            program.commit()
        self._wait()
        log.info("steps are ready after %.0f s", time.perf_counter() - started)

    def prefill(self, parts: Sequence[tuple[SequenceState, int]]) -> None:
        for group in self._groups(parts, lambda part: part[1], PROMPT_NODES):
            b, n = bucket(len(group)), node_bucket(max(length for _, length in group), PROMPT_NODES)
            program = self.program("prompt", b, n)
            buffers = program.buffers
            buffers.clear()
            result = buffers.result.host
            result["path"][:] = np.arange(n)
            rows = self._prompt_rows.place([sequence for sequence, _ in group])
            for row, (sequence, length) in zip(rows, group, strict=True):
                base = sequence.base_length
                write_tree(
                    buffers, row, base, sequence.request.prompt_token_ids[base : base + length], range(-1, length - 1)
                )
                buffers.inputs.host["state_slots"][row] = sequence.state_slot
                result["path_length"][row] = length
            program.prefill()
            program.commit()
            for row, (sequence, length) in zip(rows, group, strict=True):
                self._prefilled(sequence, buffers.hidden[row, :length])
            self._wait()  # the host writes into the same memory for the next pass

    def _verify(
        self, batch: Sequence[SequenceState], trees: Sequence[DraftTree], started: float
    ) -> tuple[list[Walk], Stages]:
        walks: list[Walk] = []
        tree_s, verify_s, accept_s = time.perf_counter() - started, 0.0, 0.0
        pairs = list(zip(batch, trees, strict=True))
        for group in self._groups(pairs, lambda pair: pair[1].num_nodes, NODES):
            t0 = time.perf_counter()
            b, n = bucket(len(group)), node_bucket(max(tree.num_nodes for _, tree in group))
            program = self.program("step", b, n)
            slow = [_needs_host(sequence, tree) for sequence, tree in group]
            rows = self.rows.place([sequence for sequence, _ in group])
            has_filters = self.inputs_of(program).write(rows, group)
            t1 = time.perf_counter()
            (program.verify if any(slow) else program.step)(has_filters=has_filters)
            self._wait()
            t2 = time.perf_counter()
            result = program.buffers.result.host
            for row, (sequence, tree), is_slow in zip(rows, group, slow, strict=True):
                if is_slow:
                    walks.append(self._host_walk(program, row, sequence, tree))
                elif result["finish"][row] == NO_DRAW:
                    walks.append(self._broken_walk(program, row, sequence, tree))
                else:
                    walks.append(_read(result, row, tree))
            if any(slow):
                program.commit()
                self._wait()
            t3 = time.perf_counter()
            tree_s, verify_s, accept_s = tree_s + t1 - t0, verify_s + t2 - t1, accept_s + t3 - t2
        return walks, (tree_s, verify_s, accept_s, 0.0)

    def _groups(self, parts: Sequence[Any], nodes: Callable[[Any], int], sizes: tuple[int, ...]) -> Iterator[list[Any]]:
        """Cuts a batch so that each part fits into the arena; mostly into one."""
        limit = self.arena.num_nodes if sizes is PROMPT_NODES else self.logits.shape[0]
        if bucket(len(parts)) * node_bucket(max(map(nodes, parts)), sizes) <= limit:
            yield list(parts)
            return
        group: list[Any] = []
        for part in parts:
            n = node_bucket(max(map(nodes, [*group, part])), sizes)
            if group and bucket(len(group) + 1) * n > limit:
                yield group
                group = []
            group.append(part)
        yield group

    def _host_walk(self, program: StepGraphs, row: int, sequence: SequenceState, tree: DraftTree) -> Walk:
        """The walk by the host's own draws, written down for the commit."""
        walk = self._walk(sequence, tree, program.logits[row])
        limit = program.buffers.max_path
        accepted = walk.accepted
        if len(accepted.path) > limit:
            accepted = Accepted(accepted.path[:limit], accepted.tokens[:limit], None)
            walk = Walk(walk.tree, accepted, walk.log_probs[:limit], walk.shadow_path)
        result = program.buffers.result.host
        result["path_length"][row] = len(accepted.path) if walk.goes_on else 0
        result["path"][row, : len(accepted.path)] = accepted.path
        return walk

    def _broken_walk(self, program: StepGraphs, row: int, sequence: SequenceState, tree: DraftTree) -> Walk:
        """A walk to a node without a draw, by the host, which says what is wrong there."""
        walk = self._walk(sequence, tree, program.logits[row])
        return replace(walk, error=walk.error or InternalError("the device found no draw where the host finds one"))

    def _wait(self) -> None:
        """Until the device has done everything so far."""
        if self._arrived is not None:
            self._arrived.record()
            self._arrived.synchronize()


def _needs_host(sequence: SequenceState, tree: DraftTree) -> bool:
    """Whether the draws need what the device's sampler does not do."""
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
