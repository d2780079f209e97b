"""How much memory the services will hold with given settings, and how large a batch fits.

The sizes come from the services' own allocations: `python -m verify_service.memory_plan` and its like.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from draftwood.cli.stack.environment import service_environment
from draftwood.config import Config, DraftConfig, VerifyConfig
from draftwood.errors import ConfigError
from draftwood.memory import physical_memory_bytes

# What does not grow with the batch; everything else is in proportion to it.
FIXED = frozenset({"weights", "libraries"})
MAX_BATCH = 1024  # what --max-batch takes

Sizes = Mapping[str, int]  # bytes by what holds them


def memory_facts(config: VerifyConfig) -> dict[str, dict[str, Any]]:
    """Sections for `draftwood info`: each service's memory, and what fits on this machine."""
    configs: dict[str, Config] = {"verify": config}
    if config.draft != "none":
        shared = {f.name for f in dataclasses.fields(DraftConfig)} - {"port"}
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name in shared}
        configs["draft"] = DraftConfig(**values)
    running = {name: _start(f"{name}_service", service) for name, service in configs.items()}
    said = {name: process.communicate() for name, process in running.items()}
    plans = {name: _sizes(running[name].returncode, *outputs) for name, outputs in said.items()}
    facts: dict[str, dict[str, Any]] = {}
    for name, sizes in plans.items():
        rows = {what: show(size) for what, size in sizes.items() if size}
        facts[f"memory: {name} service"] = rows | {"in all": show(sum(sizes.values()))}
    return facts | {f"memory: batch of {config.max_batch}": fits(plans, config.max_batch, places())}


def fits(plans: Mapping[str, Sizes], max_batch: int, free: Mapping[str, int]) -> dict[str, str]:
    """Whether the services fit in each place, together and alone, and the largest batch that does."""
    rows: dict[str, str] = {}
    for place, size in free.items():
        groups = {f"{name} service": [plan] for name, plan in plans.items()}
        if len(plans) > 1:
            groups["both services"] = list(plans.values())
        for who, sizes in groups.items():
            largest = largest_batch(sizes, max_batch, size)
            needed = sum(sum(plan.values()) for plan in sizes)
            verdict = "fits" if largest >= max_batch else "does not fit"
            rows[f"{who}, {place}"] = f"{show(needed)} of {show(size)}: {verdict}; " + (
                f"--max-batch up to {largest}" if largest else "not even one sequence does"
            )
    return rows


def largest_batch(plans: list[Sizes], max_batch: int, size: int) -> int:
    """The largest batch with which these services hold at most `size` bytes; 0 where one sequence is too much.

    Slots of scratch are counted as if they grew with the batch, so that the answer errs on the small side.
    """
    fixed = sum(size for plan in plans for what, size in plan.items() if what in FIXED)
    each = sum(size for plan in plans for what, size in plan.items() if what not in FIXED) / max_batch
    return min(MAX_BATCH, max(0, int((size - fixed) / each)))


def places() -> dict[str, int]:
    """Memory by where it is: the machine's, and each GPU's own."""
    import torch

    found = {"this machine": physical_memory_bytes()}
    for i in range(torch.cuda.device_count()):
        found[f"GPU {i}"] = torch.cuda.get_device_properties(i).total_memory
    return found


def show(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _start(module: str, config: Config) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", f"{module}.memory_plan", *config.to_args()]
    return subprocess.Popen(
        command, env=service_environment(module), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _sizes(returncode: int, output: str, complaint: str) -> Sizes:
    """What a service said. Raises ConfigError with its own words."""
    if returncode != 0:
        lines = complaint.strip().splitlines()
        raise ConfigError(lines[-1].removeprefix("error: ") if lines else "a service gave no sizes")
    return json.loads(output)
