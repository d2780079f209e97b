"""Runs every kind of pass once before the service says that it is ready, so that no request pays for compilation."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from draftwood.tree import DraftTree
from verify_service.cache.pages import SCRATCH_SLOT
from verify_service.cache.pools import reset_slot
from verify_service.core.sequence import PREFILL_CHUNK
from verify_service.cpu.commit import Committer, RowProjection
from verify_service.cpu.step_inputs import StepInputs, StepRow, build_step_inputs, padded
from verify_service.cpu.target import TreeTarget
from verify_service.step.runner import Load

log = logging.getLogger(__name__)

# Passes whose products are made in advance; code for each number of rows costs memory, 90 MiB for these.
WARM_BATCH, WARM_ROWS = 8, 512


class WarmUp:
    """Passes on scratch slots alone."""

    def __init__(self, target: TreeTarget, committer: Committer, projection: RowProjection | None) -> None:
        self.target, self.committer, self.projection = target, committer, projection

    @torch.inference_mode()
    def run(self, load: Load) -> None:
        """Passes of one and of several sequences, of lone roots and of trees."""
        verb = "compiling" if self.target.is_compiled else "warming up"
        if self.target.is_compiled:
            log.info(
                "compiling steps: three to five minutes on two cores at the first start, half a minute to a minute "
                "from the cache in ~/.cache/draftwood later"
            )
        self.target.is_warming = True
        nodes = load.tree_budget + 1
        passes = [(1, 1), (1, nodes), *([(2, nodes)] if load.max_batch > 1 else [])]
        for number, (b, n) in enumerate(passes, start=1):
            who = "one request" if b == 1 else "several requests"
            what = "a lone token" if n == 1 else f"{n} tokens"
            log.info("%s %d of %d: %s, %s", verb, number, len(passes), who, what)
            self._pass(b, n)
        self.target.is_warming = False
        self._touch_all(load.max_batch)
        # The largest passes last: what they need is then the process's own before the first request, and the heap does
        # not grow among what requests leave behind.
        prompts = min(max(load.prefill_tokens // PREFILL_CHUNK, 1), load.max_batch)
        self._pass(prompts, min(load.prefill_tokens, PREFILL_CHUNK))
        self._pass(load.max_batch, load.max_tree_budget + 1)
        reset_slot(self.target.pools, 0)

    def _touch_all(self, max_batch: int) -> None:
        """Has code made for every number of rows of products, so that memory does not grow when a rare one comes."""
        shapes = shapes_by_rows(min(max_batch, WARM_BATCH), WARM_ROWS)
        started = time.perf_counter()
        for b, n in shapes.values():
            self.target.touch(self._inputs(b, n))
        if self.projection is not None:
            width = self.target.spec.hidden_size * len(self.target.target_layer_ids)
            target_features = torch.zeros(1, width, dtype=self.target.dtype)
            for rows in sorted({padded(n) for n in range(2, WARM_ROWS + 1)}):
                self.projection(target_features, [0] * rows)
        log.info("warmed up %d numbers of rows in %.1f s", len(shapes), time.perf_counter() - started)

    def _pass(self, b: int, nodes: int) -> None:
        """A pass and a commit of one token."""
        outputs = self.target.run(self._inputs(b, nodes))
        self.target.logits(outputs.hidden)
        self.committer.commit(outputs.commit_inputs, 0, (0,), np.array([SCRATCH_SLOT]), 0, None)
        if self.projection is not None and outputs.target_features is not None:
            self.projection(outputs.target_features[0], list(range(nodes)))

    def _inputs(self, b: int, nodes: int) -> StepInputs:
        """Chains behind one token."""
        row = StepRow(DraftTree.chain(0, [0] * (nodes - 1)), 1, np.array([SCRATCH_SLOT]), 0)
        return build_step_inputs([row] * b, kernel_size=self.target.spec.conv_kernel_size)


def shapes_by_rows(max_batch: int, max_rows: int) -> dict[int, tuple[int, int]]:
    """B and N of one pass for each number of rows B N, up to `max_rows`, that passes of prompts and trees may have."""
    nodes = sorted({padded(n) for n in range(1, PREFILL_CHUNK + 1)})
    shapes = [(b, n) for b in range(1, max_batch + 1) for n in nodes if b == 1 or n > 1]
    return {b * n: (b, n) for b, n in sorted(shapes, reverse=True) if b * n <= max_rows}
