"""Times of what picks tokens on the device: draws, filters, the accept walk; a drafter's candidates and its tree.

    python -m benchmarks.kernels.sampling --out benchmarks/results/h200

Logits are bfloat16 over a vocabulary of 248320. The floor is their bytes over the copy bandwidth of the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.timing import copies, copy_bandwidth, sweep, write
from draft_service.kernels.triton.best_first import best_first_trees, best_first_trees_plain
from draft_service.kernels.triton.likeliest import likeliest, likeliest_plain, likeliest_workspace
from draftwood.sampling import SamplingParams
from verify_service.kernels.triton.accept_walk import accept_walk, accept_walk_plain
from verify_service.kernels.triton.sample import RowSampling, sample, sample_plain, sample_workspace

VOCABULARY, DEPTHS = 248320, 15
KINDS = {
    "greedy": SamplingParams(),
    "noise": SamplingParams(temperature=1.0, seed=2**63 + 5),
    "top-k 50": SamplingParams(temperature=0.7, seed=3, top_k=50),
    "top-p 0.95": SamplingParams(temperature=0.7, seed=4, top_p=0.95),
    "top-k 40, top-p 0.9, min-p 0.05": SamplingParams(temperature=0.8, seed=5, top_k=40, top_p=0.9, min_p=0.05),
    "top-p 0.999 of a flat row": SamplingParams(temperature=4.0, seed=6, top_p=0.999),
}


def logits_like(rows: int, count: int) -> list[Tensor]:
    """Rows as a language model gives them: a broad heap, and some thirty tokens that stand out."""
    made: list[Tensor] = []
    for _ in range(count):
        x = torch.randn(1, rows, VOCABULARY, device="cuda")
        peaks = torch.rand_like(x) < 30 / VOCABULARY
        made.append((x + peaks * (6 + 8 * torch.rand_like(x))).bfloat16())
    return made


def ints(*values: int) -> Tensor:
    """int32 on the device."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def draws(nodes: int, kind: str) -> dict[str, Any]:
    """One configuration of `sample`, checked against the definition and timed."""
    params = KINDS[kind]
    has_filters = kind not in ("greedy", "noise")
    batch = logits_like(nodes, min(copies(2 * nodes * VOCABULARY), 100 if not has_filters else 4))
    positions, count = torch.arange(nodes, device="cuda")[None], ints(nodes)
    sampling, workspace = RowSampling.of([params], torch.device("cuda")), sample_workspace(nodes, torch.device("cuda"))
    tokens, want = (torch.full((1, nodes), -7, dtype=torch.int32, device="cuda") for _ in range(2))
    workspace.values.fill_(torch.nan)
    sample(batch[0], positions, count, sampling, tokens, workspace, has_filters=has_filters)
    few = ints(min(nodes, 4))  # the definition takes its time
    sample_plain(batch[0], positions, few, sampling, want)
    is_equal = torch.equal(tokens[:, : int(few)], want[:, : int(few)])

    def call(x: Tensor) -> Callable[[], None]:
        return lambda: sample(x, positions, count, sampling, tokens, workspace, has_filters=has_filters)

    seconds = sweep([call(x) for x in batch])
    rival = sweep([lambda x=x: x.argmax(-1) for x in batch]) if kind == "greedy" else None
    return {"kernel": "sample", "rows": nodes, "kind": kind, "us": seconds * 1e6, "equal": is_equal} | (
        {"torch_argmax_us": rival * 1e6} if rival else {}
    )


def walks(nodes: int) -> dict[str, Any]:
    """A walk along a path of 16."""
    ids, parents = torch.arange(nodes, device="cuda")[None], ints(*range(-1, nodes - 1))[None]
    inputs = (ids, parents, ints(nodes), ints(*range(1, nodes + 1))[None], ints(-1, -1)[None], ints(100))
    shapes = ((1, 16), (1,), (1, 16), (1,))
    got, want = ([torch.full(shape, -9, dtype=torch.int32, device="cuda") for shape in shapes] for _ in range(2))
    accept_walk(*inputs, (got[0], got[1], got[2], got[3]))
    accept_walk_plain(*inputs, (want[0], want[1], want[2], want[3]))
    is_equal = all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    seconds = sweep([lambda: accept_walk(*inputs, (got[0], got[1], got[2], got[3]))] * 50)
    return {"kernel": "accept_walk", "rows": nodes, "us": seconds * 1e6, "equal": is_equal}


def candidates(sequences: int, width: int, temperature: float) -> dict[str, Any]:
    """`likeliest` over a block of 15 depths."""
    rows = sequences * DEPTHS
    batch = [x.view(sequences, DEPTHS, VOCABULARY) for x in logits_like(rows, copies(2 * rows * VOCABULARY))]
    inputs = (torch.full((sequences,), temperature, device="cuda"), torch.arange(sequences, device="cuda") + 2**62)
    base, workspace = ints(*range(sequences)), likeliest_workspace(rows, torch.device("cuda"))

    def poisoned() -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.full((sequences, DEPTHS, width), -7, dtype=torch.int32, device="cuda")
        return ids, ids.float() * torch.nan, ids.float() * torch.nan

    got, want = poisoned(), poisoned()
    likeliest(batch[0], *inputs, base, got, workspace)
    likeliest_plain(batch[0], *inputs, base, want)
    differing = int((got[0] != want[0]).sum())
    is_equal = differing == 0 if temperature == 0 else differing <= rows * width // 100  # noise is float32's
    is_equal = is_equal and bool((got[1] - want[1]).abs().max() < 1e-3)
    seconds = sweep([lambda x=x: likeliest(x, *inputs, base, got, workspace) for x in batch])
    rival = sweep([lambda x=x: (x.topk(width, -1), x.float().logsumexp(-1)) for x in batch])
    return {
        "kernel": "likeliest", "sequences": sequences, "width": width, "temperature": temperature, "us": seconds * 1e6,
        "equal": is_equal, "ids_that_differ": differing, "torch_topk_and_logsumexp_us": rival * 1e6,
    }  # fmt: skip


def trees(sequences: int, budget: int) -> dict[str, Any]:
    """`best_first_trees` with a width of 16."""
    scores = torch.randn(sequences, DEPTHS, 16, device="cuda").mul(2).log_softmax(-1).sort(-1, descending=True).values
    ids = torch.randint(0, VOCABULARY, scores.shape, dtype=torch.int32, device="cuda")
    n = budget + 1
    roots, given = ints(*range(sequences)), (ids, scores, scores)
    settings = ints(*[budget] * sequences), ints(*[16] * sequences), ints(*[0] * sequences)

    def poisoned() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        a, b, c = (torch.full((sequences, n), -9, dtype=torch.int32, device="cuda") for _ in range(3))
        return a, b, c, torch.full((sequences, n), torch.nan, device="cuda"), ints(*[-9] * sequences)

    got, want = poisoned(), poisoned()
    best_first_trees(roots, given, *settings, got)
    best_first_trees_plain(roots, given, *settings, want)
    is_equal = all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    seconds = sweep([lambda: best_first_trees(roots, given, *settings, got)] * 20)
    return {"kernel": "best_first", "sequences": sequences, "budget": budget, "us": seconds * 1e6, "equal": is_equal}


def main() -> None:
    """All of it; results as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/h200"), help="Directory for sampling.json."
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("measures on a GPU, and torch finds none here")
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(1 << 30)
    rows: list[dict[str, Any]] = []
    for nodes in (1, 64):
        for kind in KINDS:
            rows.append(draws(nodes, kind))
            rows[-1]["floor_us"] = 2 * nodes * VOCABULARY / bandwidth * 1e6
            print(rows[-1], flush=True)
    for make, settings in (
        (walks, ((16,), (64,), (256,))),
        (candidates, ((1, 16, 0.0), (1, 64, 0.0), (1, 16, 0.8))),
        (trees, ((1, 15), (1, 63), (1, 255), (8, 63))),
    ):
        for values in settings:
            rows.append(make(*values))  # type: ignore[operator]
            print(rows[-1], flush=True)
    write(args.out / "sampling.json", {"copy_bandwidth_bytes_per_s": bandwidth, "rows": rows})
    wrong = [row for row in rows if not row["equal"]]
    print("ALL EQUAL" if not wrong else f"WRONG: {wrong}")


if __name__ == "__main__":
    main()
