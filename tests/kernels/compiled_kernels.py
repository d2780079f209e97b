"""The kernels that are compiled ahead of time, with the limits that each has to keep.

One entry per kernel and configuration that is served. Add yours to ENTRIES.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = (90, 120)  # Hopper; Blackwell of workstations, which has the least shared memory
SHARED_LIMIT = {90: 227, 120: 99}  # KiB per block


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel's signature and launch options. Arguments that are not in `constants` have a type in `types`."""

    name: str
    kernel: str  # module:function
    types: dict[str, str]  # "*bf16", "*fp32", "i32", …
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    stack_limit: dict[int, int] = field(
        default_factory=dict[int, int]
    )  # bytes that each thread spills, by architecture; else 0
    architectures: tuple[int, ...] = ARCHITECTURES

    def load(self) -> Any:
        """The jit function."""
        module, name = self.kernel.split(":")
        return getattr(importlib.import_module(module), name)


ENTRIES: tuple[Entry, ...] = ()
