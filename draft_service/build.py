"""Puts the draft service together from its configuration: model, context cache, drafter, all loaded and warm."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_service.api.codec import DrafterFacts
from draft_service.draft.drafter import Drafter
from draft_service.draft.types import ContextRows, SequenceStep
from draft_service.kernels.kernel_set import KernelSet
from draft_service.model.config import DrafterConfig, read_drafter_config
from draft_service.model.draft_model import DraftModel
from draft_service.model.tensors import (
    load_drafter_tensors,
    load_target_tensors,
    random_drafter_tensors,
    random_projection_checksum,
    random_target_tensors,
)
from draftwood.checkpoint import model_id, projection_checksum, resolve, tokenizer_directory, tokenizer_hash
from draftwood.config import DraftConfig
from draftwood.device.placement import has_triton, pick_device, pick_dtype, use_threads
from draftwood.errors import ConfigError
from draftwood.security.security import Security
from draftwood.tree_options import TreeOptions

MAX_DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Service:
    """A built service, not listening yet."""

    drafter: Drafter
    worker: ThreadPoolExecutor  # one thread, which makes all calls of the drafter
    facts: DrafterFacts
    security: Security
    description: str


def build(config: DraftConfig) -> Service:
    """Loads, compiles and warms up. Raises a DraftwoodError naming the setting or tensor at fault."""
    security = Security.load(config)
    if config.draft == "none":
        raise ConfigError("--draft is 'none': a draft service needs a draft model", field="draft")
    draft, target = resolve(config.draft, setting="draft"), resolve(config.target, setting="target")
    worker = ThreadPoolExecutor(1, thread_name_prefix="drafter")
    # On the thread that will run the model: OpenMP's workers belong to it.
    drafter, threads = worker.submit(_load_drafter, config, draft, target).result()
    facts = _facts(config, draft, target, drafter)
    dtype = str(drafter.model.dtype).removeprefix("torch.")
    return Service(drafter, worker, facts, security, f"{facts.model_id}, {dtype}, {threads} threads")


def _load_drafter(config: DraftConfig, draft: Path, target: Path) -> tuple[Drafter, int]:
    """The drafter, warm, and how many threads its model has."""
    device = pick_device(config)
    dtype = pick_dtype(config, device)
    use_threads(config.threads)
    model_config = read_drafter_config(draft).with_block_size(config.block_size).with_window(config.draft_window)
    if config.random_weights:
        tensors = random_drafter_tensors(model_config, dtype, device)
        borrowed = random_target_tensors(target, model_config, dtype, device)
    else:
        tensors, borrowed = load_drafter_tensors(draft, model_config), load_target_tensors(target, model_config)
    drafter = Drafter(
        DraftModel(tensors, borrowed, model_config, dtype=dtype, device=device),
        max_context=longest_context(config, model_config),
        max_batch=config.max_batch,
        compile=config.compile,
        kernels=_tree_kernels(device),
    )
    warm_up(drafter)
    return drafter, torch.get_num_threads()


def _tree_kernels(device: torch.device) -> KernelSet | None:
    """Triton's on a GPU; without them the host makes the trees."""
    if device.type != "cuda" or not has_triton():
        return None
    from draft_service.kernels.triton.kernel_set import triton_set  # imports Triton

    return triton_set()


def longest_context(config: DraftConfig, model: DrafterConfig) -> int:
    """Tokens that a sequence's context may have."""
    return config.max_context or min(model.max_position_embeddings, MAX_DEFAULT_CONTEXT)


def _facts(config: DraftConfig, draft: Path, target: Path, drafter: Drafter) -> DrafterFacts:
    model = drafter.config
    return DrafterFacts(
        model_id=model_id(config.draft, draft),
        config=model,
        max_context=drafter.cache.max_context,
        tokenizer_hash=tokenizer_hash(tokenizer_directory(target, random_weights=config.random_weights)),
        projection_checksum=random_projection_checksum(model) if config.random_weights else projection_checksum(draft),
        incarnation=secrets.randbits(64),
    )


def warm_up(drafter: Drafter) -> None:
    """Runs alone and batched passes at two context lengths each, so that no request waits for a compiler."""
    width, longest = drafter.config.hidden_size, drafter.cache.max_context
    options = TreeOptions("ddtree", 7, 8)
    for epoch, length in enumerate((min(4, longest), min(21, longest)), start=1):
        rows = ContextRows(0, torch.zeros(length, width))
        for batch in (1, min(2, drafter.max_batch)):
            drafter.step(0, [SequenceStep(i, epoch, length, 0, rows, options) for i in range(batch)], (), lambda: False)
    drafter.close_stream(0)
