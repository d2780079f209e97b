"""Times of Mamba2 tree verify at Nemotron-H's shape: 128 heads of 64, state 128, 8 groups, bfloat16 in and out.

    python -m benchmarks.kernels.mamba2 --out benchmarks/results/h200

The floor counts the bytes of a launch, the float32 state first, over the copy bandwidth of the same run. Errors are
relative (Frobenius) to float64, of a run with float32 output.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.timing import copies, copy_bandwidth, result_path, sweep, write
from benchmarks.kernels.trees import metadata_of
from verify_service.kernels.arguments import LayerCommitInputs, TreeMetadata
from verify_service.kernels.reference import mamba2_verify as reference
from verify_service.kernels.triton.mamba2_verify import mamba2_verify

HK, HV, V, K = 8, 128, 64, 128
CHANNELS = HV * V + 2 * HK * K


def near_parents(nodes: int, rng: random.Random) -> list[int]:
    """Parents of a tree with long paths and siblings."""
    drawn = (i - 1 if rng.random() < 0.5 else rng.randrange(max(0, i - 12), i) for i in range(1, nodes))
    return [-1, *drawn]


def case(b: int, n: int) -> tuple[LayerCommitInputs, TreeMetadata, Tensor, Tensor]:
    """Fresh inputs of one layer, its states [B + 1, HV, V, K] and its skip [HV]."""
    rng = random.Random(n)
    conv = torch.nn.functional.silu(torch.randn(b, n, CHANNELS, device="cuda")).bfloat16()
    dt = torch.nn.functional.softplus(torch.randn(b, n, HV, device="cuda"))
    g = -dt * torch.rand(HV, device="cuda") * 2
    nothing = torch.empty(0, device="cuda")
    tree = metadata_of([near_parents(n, rng) for _ in range(b)], n, nothing.device)
    states = torch.randn(b + 1, HV, V, K, device="cuda")
    return LayerCommitInputs(nothing, conv, None, g, dt), tree, states, torch.randn(HV, device="cuda")


def measure(b: int, n: int, bandwidth: float) -> dict[str, Any]:
    """One shape, checked and timed over as many layers as the cache does not hold."""
    layers = [case(b, n) for _ in range(min(copies(b * HV * V * K * 4), 48))]
    exact = torch.empty(b, n, HV, V, dtype=torch.float64, device="cuda")
    precise = torch.full((b, n, HV, V), torch.nan, device="cuda")
    reference.mamba2_verify(*layers[0], exact)
    mamba2_verify(*layers[0], precise)
    error = float((precise.double() - exact).norm() / exact.norm())
    out = torch.empty(b, n, HV, V, dtype=torch.bfloat16, device="cuda")
    seconds = sweep([lambda layer=layer: mamba2_verify(*layer, out) for layer in layers])
    size = b * (HV * V * K * 4 + n * (CHANNELS * 2 + HV * 8 + HV * V * 2))
    return {"batch": b, "nodes": n, "us": seconds * 1e6, "floor_us": size / bandwidth * 1e6, "error": error}


def main() -> None:
    """All shapes; results as JSON."""
    path = result_path(__doc__, "mamba2.json")
    bandwidth = copy_bandwidth(1 << 30)
    rows: list[dict[str, Any]] = []
    for b, n in ((1, 1), (1, 16), (1, 32), (1, 64), (8, 64)):
        rows.append(measure(b, n, bandwidth))
        print(rows[-1], flush=True)
    shape = {"heads": HV, "head_dim": V, "state": K, "groups": HK}
    write(path, {"shape": shape, "copy_bandwidth_bytes_per_s": bandwidth, "rows": rows})
    print("ALL NEAR" if all(row["error"] < 2e-6 for row in rows) else "NOT NEAR")


if __name__ == "__main__":
    main()
