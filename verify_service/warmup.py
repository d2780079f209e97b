"""Runs every kind of step once before the service says that it is ready, so that no request pays for compilation."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from draftwood.tree import DraftTree
from verify_service.cache.pages import SCRATCH_SLOT
from verify_service.decoder import Decoder
from verify_service.service import Service
from verify_service.step import StepRow, derive

log = logging.getLogger(__name__)


@torch.inference_mode()
def warm_up(service: Service, *, compile_steps: bool) -> None:
    """Passes of one and of several sequences, of lone roots and of trees, on scratch slots."""
    started = time.perf_counter()
    decoder, scheduler = service.engine.decoder, service.engine.scheduler
    if compile_steps:
        log.info("compiling steps: a minute or two on the first start, seconds from the cache later")
    decoder.model.is_warming = True
    for b in (1, 2) if scheduler.max_batch > 1 else (1,):
        for nodes in (1, service.defaults.tree_budget + 1):
            _pass(decoder, b, nodes, scheduler.pages.page_size)
            log.info(
                "warm for %s of %d nodes after %.1f s",
                "one" if b == 1 else "several",
                nodes,
                time.perf_counter() - started,
            )
    decoder.model.is_warming = False
    decoder.committer.reset(0)


def _pass(decoder: Decoder, b: int, nodes: int, page_size: int) -> None:
    """A pass and a commit of one token over nothing but scratch."""
    slots = np.arange(page_size) + SCRATCH_SLOT
    rows = [StepRow(DraftTree.chain(0, [0] * (nodes - 1)), 1, slots, 0)] * b
    inputs = derive(rows, taps=decoder.model.spec.taps, scratch_slot=SCRATCH_SLOT)
    outputs = decoder.model.run(inputs, decoder.pools)
    decoder.model.logits(outputs.hidden)
    decoder.committer.commit(outputs.stash, 0, (0,), slots[:1], 0, None)
    if decoder.projector is not None and outputs.taps is not None:
        decoder.projector.project(outputs.taps[0])
