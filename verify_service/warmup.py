"""Runs every kind of step once before the service says that it is ready, so that no request pays for compilation."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from draftwood.tree import DraftTree
from verify_service.build import Service
from verify_service.cache.pages import SCRATCH_SLOT
from verify_service.cache.pools import reset_slot
from verify_service.core.sequence import PREFILL_CHUNK
from verify_service.cpu.runner import PassRunner
from verify_service.cpu.step_inputs import StepInputs, StepRow, build_step_inputs
from verify_service.gpu.runner import GraphRunner
from verify_service.model.shapes import padded

log = logging.getLogger(__name__)

# Passes whose products are made in advance; code for each number of rows costs memory, 90 MiB for these.
WARM_BATCH, WARM_ROWS = 8, 512


@torch.inference_mode()
def warm_up(service: Service, *, compile_steps: bool) -> None:
    """Passes of one and of several sequences, of lone roots and of trees, on scratch slots."""
    runner, scheduler = service.engine.runner, service.engine.scheduler
    if isinstance(runner, GraphRunner):
        runner.warm_up(has_trees=service.defaults.is_drafted)
        return
    assert isinstance(runner, PassRunner)
    if compile_steps:
        log.info(
            "compiling steps: three to five minutes on two cores at the first start, half a minute to a minute from "
            "the cache in ~/.cache/draftwood later"
        )
    runner.target.is_warming = True
    nodes = service.defaults.tree_budget + 1
    passes = [(1, 1), (1, nodes), *([(2, nodes)] if scheduler.max_batch > 1 else [])]
    for number, (b, n) in enumerate(passes, start=1):
        log.info(
            "%s %d of %d: %s, %s",
            "compiling" if compile_steps else "warming up",
            number,
            len(passes),
            "one request" if b == 1 else "several requests",
            "a lone token" if n == 1 else f"{n} tokens",
        )
        _pass(runner, b, n, scheduler.pages.page_size)
    runner.target.is_warming = False
    _touch_all(runner, scheduler.max_batch, scheduler.pages.page_size)
    # The largest passes last: what they need is then the process's own before the first request, and the heap does not
    # grow among what requests leave behind.
    largest = service.defaults.limits.max_tree_budget + 1 if service.defaults.is_drafted else 1
    prompts = min(max(service.engine.prefill_tokens // PREFILL_CHUNK, 1), scheduler.max_batch)
    for b, n in ((prompts, min(service.engine.prefill_tokens, PREFILL_CHUNK)), (scheduler.max_batch, largest)):
        _pass(runner, b, n, scheduler.pages.page_size)
    reset_slot(runner.pools, 0)


def shapes_by_rows(max_batch: int, max_rows: int) -> dict[int, tuple[int, int]]:
    """B and N of one pass for each number of rows B N, up to `max_rows`, that passes of prompts and trees may have."""
    nodes = sorted({padded(n) for n in range(1, PREFILL_CHUNK + 1)})
    shapes = [(b, n) for b in range(1, max_batch + 1) for n in nodes if b == 1 or n > 1]
    return {b * n: (b, n) for b, n in sorted(shapes, reverse=True) if b * n <= max_rows}


def _touch_all(runner: PassRunner, max_batch: int, page_size: int) -> None:
    """Has the code of products made for every number of rows, so that memory does not grow when a rare one comes."""
    shapes = shapes_by_rows(min(max_batch, WARM_BATCH), WARM_ROWS)
    started = time.perf_counter()
    for b, n in shapes.values():
        runner.target.touch(_inputs(runner, b, n, page_size))
    if runner.projection is not None:
        width = runner.target.spec.hidden_size * len(runner.target.target_layer_ids)
        target_features = torch.zeros(1, width, dtype=runner.target.dtype)
        for rows in sorted({padded(n) for n in range(2, WARM_ROWS + 1)}):
            runner.projection(target_features, [0] * rows)
    log.info("warmed up %d numbers of rows in %.1f s", len(shapes), time.perf_counter() - started)


def _pass(runner: PassRunner, b: int, nodes: int, page_size: int) -> None:
    """A pass and a commit of one token over nothing but scratch."""
    outputs = runner.target.run(_inputs(runner, b, nodes, page_size))
    runner.target.logits(outputs.hidden)
    runner.committer.commit(outputs.commit_inputs, 0, (0,), np.array([SCRATCH_SLOT]), 0, None)
    if runner.projection is not None and outputs.target_features is not None:
        runner.projection(outputs.target_features[0], list(range(nodes)))


def _inputs(runner: PassRunner, b: int, nodes: int, page_size: int) -> StepInputs:
    """Chains over nothing but scratch."""
    slots = np.arange(page_size) + SCRATCH_SLOT
    rows = [StepRow(DraftTree.chain(0, [0] * (nodes - 1)), 1, slots, 0)] * b
    return build_step_inputs(rows, kernel_size=runner.target.spec.conv_kernel_size, scratch_slot=SCRATCH_SLOT)
