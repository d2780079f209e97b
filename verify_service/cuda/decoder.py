"""The decoder over static buffers: a step is one graph launch and one small read-back.

Rows whose draws need more than the device's sampler knows take a slower way: the graph stops before the commit, the
host draws for them from their logits, and a second graph commits what was accepted of all rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from draftwood.graphs import Graphs
from draftwood.tree import DraftTree
from verify_service.acceptance import Accepted, Finish
from verify_service.cuda.buffers import MAX_STOP_IDS, Arena, StepBuffers
from verify_service.cuda.memory import NODES, PROMPT_NODES, drawn_nodes, node_bucket, passed_nodes
from verify_service.cuda.programs import StepProgram
from verify_service.cuda.rows import RowTable, bucket
from verify_service.cuda.target import RowTarget
from verify_service.decoder import Decoder, Walk
from verify_service.features import FeatureProjector
from verify_service.request import StageTimes
from verify_service.sequence import Sequence

log = logging.getLogger(__name__)

MAX_PATH = 16  # accepted nodes a step; a longer walk goes on in the next one
FINISHES = (None, Finish.STOP, Finish.LENGTH)


class GraphDecoder(Decoder):
    """Runs on the engine's thread, its warm-up before that on another."""

    def __init__(
        self,
        target: RowTarget,
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
        self._rows = RowTable(bucket(max_batch), num_pages, target.device)
        self._prompt_rows = RowTable(bucket(max_batch), num_pages, target.device)
        self._programs: dict[tuple[str, int, int], StepProgram] = {}
        self._arrived = torch.cuda.Event() if target.device.type == "cuda" else None

    def program(self, kind: str, b: int, n: int) -> StepProgram:
        """The program of a bucket, made when it is first asked for; `kind` is "step" or "prompt"."""
        program = self._programs.get((kind, b, n))
        if program is None:
            is_step = kind == "step"
            rows, max_path = (self._rows, min(n, MAX_PATH)) if is_step else (self._prompt_rows, n)
            buffers = StepBuffers(b, n, arena=self.arena, page_table=rows.pages, max_path=max_path)
            logits = self.logits[: b * n] if is_step else self.logits[:0]
            program = StepProgram(self.model, buffers, logits, self.projector, self.graphs)
            self._programs[(kind, b, n)] = program
        return program

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs every program over spare rows, so that no request pays for compilation and capture."""
        batches = [1 << i for i in range(bucket(self.max_batch).bit_length())]
        started = time.perf_counter()
        shapes = [(b, n) for b in reversed(batches) for n in reversed(NODES) if n <= self.max_nodes]
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

    def prefill(self, parts: Seq[tuple[Sequence, int]]) -> None:
        for group in self._groups(parts, lambda part: part[1], PROMPT_NODES):
            b, n = bucket(len(group)), node_bucket(max(length for _, length in group), PROMPT_NODES)
            program = self.program("prompt", b, n)
            buffers = program.buffers
            buffers.clear()
            result = buffers.result.host
            result["path_length"].fill(0)
            result["path"][:] = np.arange(n)
            rows = self._prompt_rows.place([sequence for sequence, _ in group])
            for row, (sequence, length) in zip(rows, group, strict=True):
                base = sequence.base_length
                _write_tree(buffers.inputs.host, row, sequence, _chain(sequence.request.prompt[base : base + length]))
                result["path_length"][row] = length
            program.prefill()
            program.commit()
            for row, (sequence, length) in zip(rows, group, strict=True):
                self._prefilled(sequence, buffers.hidden[row, :length])
            self._wait()  # the host writes into the same memory for the next pass

    def _verify(self, batch: Seq[Sequence], trees: Seq[DraftTree], started: float) -> tuple[list[Walk], StageTimes]:
        walks: list[Walk] = []
        tree_s, verify_s, accept_s = time.perf_counter() - started, 0.0, 0.0
        pairs = list(zip(batch, trees, strict=True))
        for group in self._groups(pairs, lambda pair: pair[1].num_nodes, NODES):
            t0 = time.perf_counter()
            b, n = bucket(len(group)), node_bucket(max(tree.num_nodes for _, tree in group))
            program = self.program("step", b, n)
            slow = [_needs_host(sequence, tree) for sequence, tree in group]
            rows = self._rows.place([sequence for sequence, _ in group])
            has_filters = self._write(program.buffers, rows, group)
            t1 = time.perf_counter()
            (program.verify if any(slow) else program.step)(has_filters=has_filters)
            self._wait()
            t2 = time.perf_counter()
            result = program.buffers.result.host
            for row, (sequence, tree), is_slow in zip(rows, group, slow, strict=True):
                walk = self._host_walk(program, row, sequence, tree) if is_slow else _read(result, row, tree)
                walks.append(walk)
            if any(slow):
                program.commit()
                self._wait()
            t3 = time.perf_counter()
            tree_s, verify_s, accept_s = tree_s + t1 - t0, verify_s + t2 - t1, accept_s + t3 - t2
        return walks, StageTimes(tree=tree_s, verify=verify_s, accept=accept_s)

    def _groups(self, parts: Seq[Any], nodes: Callable[[Any], int], sizes: tuple[int, ...]) -> Iterator[list[Any]]:
        """Cuts a batch so that each part fits into the arena; mostly into one."""
        limit = self.arena.num_nodes if sizes is PROMPT_NODES else self.logits.shape[0]
        group: list[Any] = []
        for part in parts:
            n = node_bucket(max(map(nodes, [*group, part])), sizes)
            if group and bucket(len(group) + 1) * n > limit:
                yield group
                group = []
            group.append(part)
        yield group

    def _write(self, buffers: StepBuffers, rows: Seq[int], group: Seq[tuple[Sequence, DraftTree]]) -> bool:
        """The host's inputs of a step; returns whether a row's draws are filtered."""
        buffers.clear()
        host, has_filters = buffers.inputs.host, False
        for row, (sequence, tree) in zip(rows, group, strict=True):
            _write_tree(host, row, sequence, tree)
            request, sampling = sequence.request, sequence.request.sampling
            stops = sorted(request.stop_token_ids)[:MAX_STOP_IDS]
            host["remaining"][row] = max(sequence.num_remaining, 1)
            host["stop_ids"][row, : len(stops)] = stops
            if not sampling.is_greedy:
                host["temperature"][row], host["top_k"][row] = sampling.temperature, sampling.top_k
                host["top_p"][row], host["min_p"][row] = sampling.top_p, sampling.min_p
                host["seeds"][row] = np.uint64(sampling.seed).astype(np.int64)
                has_filters |= bool(sampling.top_k) or sampling.top_p < 1.0 or sampling.min_p > 0.0
        return has_filters

    def _host_walk(self, program: StepProgram, row: int, sequence: Sequence, tree: DraftTree) -> Walk:
        """The walk by the host's own draws, written down for the commit."""
        walk = self._walk(sequence, tree, program.logits[row])
        limit = program.buffers.max_path
        accepted = walk.accepted
        if len(accepted.path) > limit:
            accepted = Accepted(accepted.path[:limit], accepted.tokens[:limit], None)
            walk = Walk(walk.tree, accepted, walk.log_probs[:limit], walk.shadow_path)
        result = program.buffers.result.host
        result["path_length"][row] = 0 if accepted.finish else len(accepted.path)
        result["path"][row, : len(accepted.path)] = accepted.path
        return walk

    def _wait(self) -> None:
        """Until the device has done everything so far."""
        if self._arrived is not None:
            self._arrived.record()
            self._arrived.synchronize()


def _needs_host(sequence: Sequence, tree: DraftTree) -> bool:
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


def _write_tree(host: dict[str, Any], row: int, sequence: Sequence, tree: DraftTree) -> None:
    n = tree.num_nodes
    host["input_ids"][row, :n] = tree.token_ids
    host["parents"][row, :n] = tree.parents
    host["num_nodes"][row] = n
    host["base_lengths"][row] = sequence.base_length
    host["state_slots"][row] = sequence.state_slot


def _chain(token_ids: Seq[int]) -> DraftTree:
    return DraftTree.chain(token_ids[0], token_ids[1:])


def _read(result: dict[str, Any], row: int, tree: DraftTree) -> Walk:
    """The device's walk of a row."""
    tokens = result["tokens"][row]
    count = int((tokens >= 0).sum())
    path = tuple(result["path"][row, :count].tolist())
    return Walk(tree, Accepted(path, tuple(tokens[:count].tolist()), FINISHES[result["finish"][row]]), ())
