"""Runs every kind of step once before the service says that it is ready, so that no request pays for compilation."""

from __future__ import annotations

import logging
import time

import torch

from draftwood.tree import DraftTree
from verify_service.cache.pages import SCRATCH_SLOT
from verify_service.service import Service
from verify_service.step import StepRow, derive

log = logging.getLogger(__name__)


@torch.inference_mode()
def warm_up(service: Service, *, compile_steps: bool) -> None:
    """Passes of one and of several sequences, of lone roots and of trees, on scratch slots."""
    started = time.perf_counter()
    decoder, scheduler = service.engine.decoder, service.engine.scheduler
    if compile_steps:
        log.info("compiling steps; the first start takes a minute or two, later ones use the cache")
    pages = scheduler.pages.allocate(4 * scheduler.pages.page_size)
    slots = scheduler.pages.slots(pages)
    batches = (1, 2) if scheduler.max_batch > 1 else (1,)
    for b in batches:
        for nodes in (1, service.defaults.tree_budget + 1, service.defaults.tree_budget + 3):
            tree = DraftTree.chain(0, [0] * (nodes - 1))
            rows = [StepRow(tree, 20, slots, 0)] * b
            inputs = derive(rows, taps=decoder.model.spec.taps, scratch_slot=SCRATCH_SLOT)
            outputs = decoder.model.run(inputs, decoder.pools)
            decoder.model.logits(outputs.hidden)
            decoder.committer.commit(outputs.stash, 0, (0,), slots[:1], 0, None)
            if decoder.projector is not None and outputs.taps is not None:
                decoder.projector.project(outputs.taps[0])
    scheduler.pages.free(pages)
    decoder.committer.reset(0)
    log.info("warm after %.1f s", time.perf_counter() - started)
