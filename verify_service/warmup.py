"""Runs every kind of step once before the service says that it is ready, so that no request pays for compilation."""

from __future__ import annotations

import logging

import numpy as np
import torch

from draftwood.tree import DraftTree
from verify_service.cache.pages import SCRATCH_SLOT
from verify_service.cache.pools import reset_slot
from verify_service.cuda.decoder import GraphDecoder
from verify_service.pass_decoder import PassDecoder
from verify_service.service import Service
from verify_service.step import StepRow, derive

log = logging.getLogger(__name__)


@torch.inference_mode()
def warm_up(service: Service, *, compile_steps: bool) -> None:
    """Passes of one and of several sequences, of lone roots and of trees, on scratch slots."""
    decoder, scheduler = service.engine.decoder, service.engine.scheduler
    if isinstance(decoder, GraphDecoder):
        decoder.warm_up(has_trees=service.defaults.is_drafted)
        return
    assert isinstance(decoder, PassDecoder)
    if compile_steps:
        log.info(
            "compiling steps: three to five minutes on two cores at the first start, half a minute to a minute from "
            "the cache in ~/.cache/draftwood later"
        )
    decoder.model.is_warming = True
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
        _pass(decoder, b, n, scheduler.pages.page_size)
    decoder.model.is_warming = False
    # The largest passes last: what they need is then the process's own before the first request, and the heap does not
    # grow among what requests leave behind.
    largest = service.defaults.limits.max_tree_budget + 1 if service.defaults.is_drafted else 1
    for b, n in ((1, service.engine.prefill_tokens), (scheduler.max_batch, largest)):
        _pass(decoder, b, n, scheduler.pages.page_size)
    reset_slot(decoder.pools, 0)


def _pass(decoder: PassDecoder, b: int, nodes: int, page_size: int) -> None:
    """A pass and a commit of one token over nothing but scratch."""
    slots = np.arange(page_size) + SCRATCH_SLOT
    rows = [StepRow(DraftTree.chain(0, [0] * (nodes - 1)), 1, slots, 0)] * b
    inputs = derive(rows, taps=decoder.model.spec.taps, scratch_slot=SCRATCH_SLOT)
    outputs = decoder.model.run(inputs, decoder.pools)
    decoder.model.logits(outputs.hidden)
    decoder.committer.commit(outputs.stash, 0, (0,), slots[:1], 0, None)
    if decoder.projector is not None and outputs.taps is not None:
        decoder.projector.project(outputs.taps[0])
