"""The kernels that are compiled ahead of time, with the limits that each has to keep.

One entry a kernel and configuration that is served. Add yours to ENTRIES.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = (90, 120)  # Hopper; Blackwell of workstations, which has the least shared memory
SHARED_LIMIT = {90: 227, 120: 99}  # KiB a block


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
    )  # bytes a thread spills, by architecture; else 0
    architectures: tuple[int, ...] = ARCHITECTURES

    def load(self) -> Any:
        """The jit function."""
        module, name = self.kernel.split(":")
        return getattr(importlib.import_module(module), name)


# Gated DeltaNet of Qwen3.6-27B.
GDN: dict[str, Any] = {"C": 10240, "HK": 16, "HV": 48, "K": 128, "OVERLAPS": True}
KERNELS = "verify_service.triton_kernels"


def pointers(**names: str) -> dict[str, str]:
    """Types of arguments, by type: bf16="x y" gives x and y pointers to bfloat16, and i32_="n" a number."""
    types: dict[str, str] = {}
    for kind, arguments in names.items():
        types |= {name: kind[:-1] if kind.endswith("_") else f"*{kind}" for name in arguments.split()}
    return types


CONV_GATE = pointers(
    bf16="x window inputs conv step write",
    fp32="weight bias norms decay dt_bias g beta",
    i32="parents slots",
    i32_="x_batch x_row step_batch step_row write_batch write_row N",
    fp32_="low high",
)
GDN_MATRICES = pointers(
    bf16="conv matrices", fp32="norms g beta factors scratch", i64="ancestors", i32_="N", fp32_="scale"
)
GDN_VERIFY = pointers(
    bf16="conv matrices out", fp32="factors carried states", i32="slots", i32_="N"
)
GDN_ROOT = pointers(
    bf16="conv out gate weight", fp32="norms g beta states", i32="slots", i32_="gate_batch", fp32_="eps scale"
)
GATED_NORM = pointers(bf16="out gate weight", i32_="gate_batch gate_row N rows", fp32_="eps")
RECURRENT_COMMIT = pointers(
    bf16="conv inputs windows", fp32="norms g beta states", i32="path length slots snapshots", i32_="B N T"
)


def gdn_entries() -> tuple[Entry, ...]:
    """The kernels of Gated DeltaNet layers at served sizes."""
    conv = {"C": 10240, "TAPS": 4, "NORMED": 32, "HV": 48, "HVP": 64, "BC": 128, "BN": 8}
    conv |= {"HAS_BIAS": False, "SILU": True, "IS_DELTA": True, "OVERLAPS": True}
    commit = {"D": 16, "HK": 16, "HV": 48, "K": 128, "V": 128, "C": 10240, "TAPS": 4, "BV": 16, "KC": 32, "BC": 1024}
    verify = GDN | {"V": 128, "BK": 64}
    whole = {"V": 128, "BV": 128, "NORM": True}
    module = f"{KERNELS}.gdn_matrices:gdn_matrices_kernel"
    matrices = tuple(
        Entry(f"gdn_matrices-{block}x{blocks}", module, GDN_MATRICES, GDN | {"BT": block, "BLOCKS": blocks})
        for block, blocks in ((16, 1), (32, 1), (64, 1), (64, 4))
    )
    module = f"{KERNELS}.gdn_verify:gdn_verify_kernel"
    verifies = tuple(
        Entry(
            f"gdn_verify-{block}x{blocks}",
            module,
            GDN_VERIFY,
            verify | {"BT": block, "BLOCKS": blocks, "BV": 64},
        )
        for block, blocks in ((16, 1), (32, 1), (64, 1), (64, 4))
    )
    return (
        Entry("conv_gate", f"{KERNELS}.conv_gate:conv_gate_kernel", CONV_GATE, conv),
        *matrices,
        *verifies,
        Entry(
            "gated_norm",
            f"{KERNELS}.gdn_verify:gated_norm_kernel",
            GATED_NORM,
            {"HV": 48, "V": 128, "BR": 16, "OVERLAPS": True},
        ),
        Entry("gdn_root", f"{KERNELS}.gdn_verify:gdn_root_kernel", GDN_ROOT, GDN | whole, num_warps=8),
        *(
            Entry(
                f"recurrent_commit{'-snapshots' if snapshots else ''}",
                f"{KERNELS}.recurrent_commit:recurrent_commit_kernel",
                RECURRENT_COMMIT,
                commit | {"IS_DELTA": True, "HAS_SNAPSHOTS": snapshots},
                num_warps=1,
            )
            for snapshots in (False, True)
        ),
    )


ENTRIES: tuple[Entry, ...] = gdn_entries()
