"""Kernels of Gated DeltaNet layers at the sizes of Qwen3.6-27B."""

from __future__ import annotations

from typing import Any

from tests.kernels.compiled_kernels import Entry

# Gated DeltaNet of Qwen3.6-27B.
GDN: dict[str, Any] = {"C": 10240, "HK": 16, "HV": 48, "K": 128, "OVERLAPS": True}
KERNELS = "verify_service.kernels.triton"


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
    bf16="conv matrices out gate weight", fp32="factors carried states", i32="slots", i32_="gate_batch gate_row N",
    fp32_="eps",
)  # fmt: skip
GDN_ROOT = pointers(
    bf16="conv out gate weight", fp32="norms g beta states", i32="slots", i32_="gate_batch", fp32_="eps scale"
)
STATE_PER_NODE = pointers(
    bf16="conv out", fp32="norms g beta states nodes", i32="parents slots", fp32_="scale"
)  # a rival of the benchmarks
GATED_NORM = pointers(bf16="out gate weight", i32_="gate_batch gate_row N rows", fp32_="eps")
RECURRENT_COMMIT = pointers(
    bf16="conv inputs windows", fp32="norms g beta states", i32="path length slots", i32_="B N T"
)


def _entries() -> tuple[Entry, ...]:
    """The kernels of Gated DeltaNet layers at served sizes."""
    conv = {"C": 10240, "KERNEL_SIZE": 4, "NORMED": 32, "HV": 48, "HVP": 64, "BC": 128, "BN": 8}
    conv |= {"HAS_BIAS": False, "SILU": True, "IS_DELTA": True, "OVERLAPS": True}
    commit = {
        "D": 16,
        "HK": 16,
        "HV": 48,
        "K": 128,
        "V": 128,
        "C": 10240,
        "KERNEL_SIZE": 4,
        "BV": 64,
        "KC": 32,
        "BC": 1024,
    }
    verify = GDN | {"V": 128, "BK": 64}
    whole = {"V": 128, "BV": 128, "NORM": True}
    module = f"{KERNELS}.gdn_matrices:gdn_matrices_kernel"
    matrices = tuple(
        Entry(
            f"gdn_matrices-{block}x{blocks}",
            module,
            GDN_MATRICES,
            GDN | {"BT": block, "BLOCKS": blocks},
            stack_limit={120: 512},
            architectures=(90, 120) if blocks == 1 else (90,),
        )
        for block, blocks in ((64, 1), (64, 4))
    )
    module = f"{KERNELS}.gdn_verify:gdn_verify_kernel"
    verifies = tuple(
        Entry(
            f"gdn_verify-{block}x{blocks}{'-norm' if norm else ''}",
            module,
            GDN_VERIFY,
            verify | {"BT": block, "BLOCKS": blocks, "BV": 128 if norm else 64, "NORM": norm},
            num_warps=8 if norm else 4,
            stack_limit={90: 0 if norm else 64, 120: 160 if norm else 64},
            architectures=(90, 120) if blocks == 1 else (90,),
        )
        for block, blocks, norm in ((64, 1, False), (64, 4, False), (16, 1, True), (64, 1, True))
    )
    return (
        Entry("conv_gate", f"{KERNELS}.conv_gate:conv_gate_kernel", CONV_GATE, conv),
        *matrices,
        *verifies,
        Entry(
            "state_per_node",
            "benchmarks.kernels.gdn_rivals:state_per_node_kernel",
            STATE_PER_NODE,
            {name: size for name, size in verify.items() if name not in ("BK", "OVERLAPS")} | {"N": 64, "BV": 16},
            num_warps=1,
            architectures=(90,),
        ),
        Entry(
            "gated_norm",
            f"{KERNELS}.gdn_verify:gated_norm_kernel",
            GATED_NORM,
            {"HV": 48, "V": 128, "BR": 16, "OVERLAPS": True},
        ),
        Entry("gdn_root", f"{KERNELS}.gdn_verify:gdn_root_kernel", GDN_ROOT, GDN | whole, num_warps=8),
        Entry(
            "recurrent_commit",
            f"{KERNELS}.commit:recurrent_commit_kernel",
            RECURRENT_COMMIT,
            commit | {"IS_DELTA": True},
            num_warps=4,
        ),
        Entry(
            "recurrent_commit-windows",
            f"{KERNELS}.commit:recurrent_commit_kernel",
            RECURRENT_COMMIT | pointers(i32="conv norms g beta"),
            commit
            | {"HV": 0, "HK": 1, "K": 16, "V": 16, "BV": 16, "KC": 16, "C": 2048, "KERNEL_SIZE": 3}
            | {"IS_DELTA": False},
            num_warps=1,
        ),
    )


GDN_LAYERS = _entries()
