"""Puts the verify service together from its configuration: model, pools, engine, draft client."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from draftwood.checkpoint import model_id, resolve, tokenizer_directory, tokenizer_hash
from draftwood.config import VerifyConfig
from draftwood.device.graphs import Graphs
from draftwood.device.placement import has_triton, pick_device, pick_dtype, use_threads
from draftwood.errors import ConfigError
from draftwood.memory import physical_memory_bytes
from draftwood.security.security import Security
from verify_service.api.codec import Defaults, TargetFacts
from verify_service.cache.pages import PageAllocator, SlotAllocator
from verify_service.cache.pools import Pools, allocate_pools
from verify_service.core.request import Limits
from verify_service.core.target_spec import TargetSpec
from verify_service.cpu.runner import PassRunner
from verify_service.cpu.target import TreeTarget
from verify_service.draft.client import DraftClient, Expected
from verify_service.draft.coordinator import DraftCoordinator
from verify_service.engine.engine import Engine
from verify_service.engine.scheduler import Scheduler
from verify_service.gpu.memory import PassLimits
from verify_service.gpu.runner import GraphRunner
from verify_service.gpu.target import GraphTarget
from verify_service.kernels.kernel_set import KernelSet
from verify_service.kernels.reference.kernel_set import PLAIN
from verify_service.model.features import FeatureProjector, load_projector
from verify_service.model.loading import load_target
from verify_service.model.target import TargetParts
from verify_service.step.runner import AnyRunner, Load

log = logging.getLogger(__name__)

DEFAULT_MAX_CONTEXT = 8192
META = torch.device("meta")
CPU_TREE_BUDGET, GPU_TREE_BUDGET = 7, 31


@dataclass(frozen=True, slots=True)
class Service:
    """A built service, not started."""

    engine: Engine
    client: DraftClient | None
    defaults: Defaults
    facts: TargetFacts
    security: Security
    description: str

    def warm_up(self) -> None:
        """Readies the runner for what the settings allow."""
        limits, scheduler = self.defaults.limits, self.engine.scheduler
        largest = limits.max_tree_budget if self.defaults.is_drafted else 0
        load = Load(scheduler.max_batch, self.defaults.tree_budget, largest, self.engine.prefill_tokens)
        self.engine.runner.warm_up(load)


def build(config: VerifyConfig, *, kernels: KernelSet | None = None) -> Service:
    """Loads and allocates everything. Raises a DraftwoodError naming the setting, layer or tensor at fault.

    With `kernels`, steps run as graphs of those over static buffers, which a GPU's always do.
    """
    security = Security.load(config)
    device = pick_device(config)
    if kernels is None and device.type == "cuda":
        kernels = _gpu_kernels()
    dtype = pick_dtype(config, device)
    use_threads(config.threads)
    directory = resolve(config.target, setting="target")
    unsafe, random_weights = config.allow_hybrid_unsafe, config.random_weights
    model, spec = load_target(directory, dtype, device, allow_unsafe=unsafe, random_weights=random_weights)
    max_context = longest_context(config, spec)
    projector = None
    if config.draft != "none":
        draft = resolve(config.draft, setting="draft")
        projector = load_projector(draft, spec, dtype, device, random_weights=random_weights)
    pages, slots = cache_sizes(config, max_context)
    room = (spec, pages, slots, projector.hidden_size if projector else 0, dtype)
    if device.type == "cpu":
        _check_memory(config, max_context, allocate_pools(*room, META))
    pools = allocate_pools(*room, device)
    layer_ids = projector.target_layer_ids if projector else ()
    parts = TargetParts(model, spec, pools, layer_ids, max_context, config.compile)
    runner = _runner(config, parts, projector, kernels)
    runner.debug_steps = config.debug_metrics
    batch, queue = config.max_batch, config.max_queue
    scheduler = Scheduler(pages, slots, max_batch=batch, max_queue=queue, prefill_chunk=runner.prefill_chunk)
    facts = TargetFacts(
        spec,
        model_id(config.target, directory),
        str(dtype).removeprefix("torch."),
        tokenizer_hash(tokenizer_directory(directory, random_weights=random_weights)),
        projector.checksum if projector else "",
    )
    client = None
    if projector is not None and config.drafter != "none":
        expected = Expected(layer_ids, projector.hidden_size, spec.vocab_size, facts.tokenizer_hash, projector.checksum)
        client = DraftClient(config.drafter, expected, security)
    drafter = DraftCoordinator(client, pools, timeout_s=config.draft_timeout_ms / 1e3)
    engine = Engine(runner, scheduler, drafter, prefill_tokens=config.prefill_tokens)
    defaults = _defaults(config, spec, max_context, device, is_drafted=client is not None)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return Service(engine, client, defaults, facts, security, f"{facts.model_id}, {facts.dtype}, {place}")


def _gpu_kernels() -> KernelSet:
    """Triton's, and without it plain ones, operator by operator."""
    if not has_triton():
        log.warning("Triton is not installed: kernels run as plain PyTorch, many times slower, and without graphs")
        return PLAIN
    from verify_service.kernels.triton.kernel_set import TritonKernels  # imports Triton

    return TritonKernels()


def _runner(
    config: VerifyConfig, parts: TargetParts, projector: FeatureProjector | None, kernels: KernelSet | None
) -> AnyRunner:
    if kernels is None:
        return PassRunner(TreeTarget(parts), projector)
    target = GraphTarget(parts, kernels, config.page_size)
    capture = Graphs(target.device, enabled=target.is_capturable and kernels.is_capturable)
    return GraphRunner(target, projector, capture, pass_limits(config))


def pass_limits(config: VerifyConfig) -> PassLimits:
    """What a GPU's passes have static memory for."""
    return PassLimits(config.max_batch, config.max_tree_budget + 1, config.prefill_tokens)


def longest_context(config: VerifyConfig, spec: TargetSpec) -> int:
    """Tokens that a sequence may have, its answer included. Raises ConfigError for more than the target takes."""
    if config.max_context > spec.max_positions:
        raise ConfigError(
            f"--max-context is {config.max_context}, more than the {spec.max_positions} positions of the target",
            field="max_context",
        )
    longest = config.max_context or min(spec.max_positions, DEFAULT_MAX_CONTEXT)
    return min(longest, config.cache_tokens) if config.cache_tokens else longest  # what never fits is refused


def cache_sizes(config: VerifyConfig, max_context: int) -> tuple[PageAllocator, SlotAllocator]:
    """Pages and state slots: those that are set, else for a full batch of the longest sequences."""
    pages_each = -(-max_context // config.page_size)
    num_pages = -(-config.cache_tokens // config.page_size) or config.max_batch * pages_each
    return PageAllocator(num_pages, config.page_size), SlotAllocator(config.max_batch)


def _check_memory(config: VerifyConfig, max_context: int, pools: Pools) -> None:
    """Memory of caches is had when they are first written to, so that too much of it would end the service later."""
    sizes, available = pools.sizes(), physical_memory_bytes()
    if sum(sizes.values()) > available:
        parts = ", ".join(f"{what} {size / 2**30:.1f} GiB" for what, size in sizes.items() if size)
        raise ConfigError(
            f"--max-batch {config.max_batch} sequences of {max_context} tokens need more memory than this machine's "
            f"{available / 2**30:.1f} GiB ({parts}); lower --max-batch, --max-context or --cache-tokens",
            field="max_batch",
        )


def _defaults(
    config: VerifyConfig, spec: TargetSpec, max_context: int, device: torch.device, *, is_drafted: bool
) -> Defaults:
    usual = CPU_TREE_BUDGET if device.type == "cpu" else GPU_TREE_BUDGET
    return Defaults(
        limits=Limits(spec.vocab_size, max_context, config.max_tree_budget, 64),
        algorithm=config.algorithm if is_drafted else "none",
        tree_budget=config.tree_budget or min(usual, config.max_tree_budget),
        width_cap=config.tree_width_cap,
        spine=config.tree_spine,
        shadow_linear=config.shadow_linear,
        stop_token_ids=frozenset(spec.stop_token_ids),
        is_drafted=is_drafted,
    )
