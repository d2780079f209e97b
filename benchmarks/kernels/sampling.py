"""Times of what picks tokens on the device: draws, filters, the accept walk; a drafter's candidates and its tree.

    python -m benchmarks.kernels.sampling --out benchmarks/results/h200

Logits are bfloat16 over a vocabulary of 248320. The floor is their bytes over the copy bandwidth of the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.draw_settings import draw_settings_of
from benchmarks.kernels.timing import copies, copy_bandwidth, result_path, sweep, write
from benchmarks.kernels.trees import metadata_of
from draft_service.kernels.arguments import Candidates, TreeNodes, TreeSettings
from draft_service.kernels.reference.kernel_set import PLAIN as PLAIN_TREES
from draft_service.kernels.triton.best_first import best_first
from draft_service.kernels.triton.likeliest import Likeliest
from draftwood.sampling import SamplingParams
from verify_service.kernels.arguments import Outcome
from verify_service.kernels.reference.kernel_set import PLAIN
from verify_service.kernels.triton.acceptance import Sample, accept_walk

VOCABULARY, DEPTHS = 248320, 15
CUDA = torch.device("cuda")
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


def are_equal(got: Outcome | TreeNodes, want: Outcome | TreeNodes) -> bool:
    """Whether all their tensors are."""
    return all(torch.equal(getattr(got, field.name), getattr(want, field.name)) for field in fields(got))


def tree_settings(sequences: int, budget: int) -> TreeSettings:
    """Trees of a width of 16, without noise and spines."""
    return TreeSettings(
        seeds=torch.zeros(sequences, dtype=torch.int64, device="cuda"),
        temperature=torch.zeros(sequences, device="cuda"),
        base_lengths=ints(*range(sequences)),
        roots=ints(*range(sequences)),
        budgets=ints(*[budget] * sequences),
        widths=ints(*[16] * sequences),
        spines=ints(*[0] * sequences),
    )


def draws(nodes: int, kind: str) -> dict[str, Any]:
    """One configuration of `sample`, checked against the definition and timed."""
    params = KINDS[kind]
    has_filters = kind not in ("greedy", "noise")
    batch = logits_like(nodes, min(copies(2 * nodes * VOCABULARY), 100 if not has_filters else 4))
    sample, tree = Sample(), metadata_of([range(-1, nodes - 1)], nodes, CUDA)
    settings = draw_settings_of([params], CUDA)
    tokens, want = (torch.full((1, nodes), -7, dtype=torch.int32, device="cuda") for _ in range(2))
    sample.workspace(nodes, CUDA).values.fill_(torch.nan)
    sample(batch[0], tree, settings, tokens, has_filters=has_filters)
    few = min(nodes, 4)  # the definition takes its time
    PLAIN.sample(batch[0], replace(tree, num_nodes=ints(few)), settings, want, has_filters=has_filters)
    is_equal = torch.equal(tokens[:, :few], want[:, :few])

    def call(x: Tensor) -> Callable[[], None]:
        return lambda: sample(x, tree, settings, tokens, has_filters=has_filters)

    seconds = sweep([call(x) for x in batch])
    rival = sweep([lambda x=x: x.argmax(-1) for x in batch]) if kind == "greedy" else None
    return {"kernel": "sample", "rows": nodes, "kind": kind, "us": seconds * 1e6, "equal": is_equal} | (
        {"torch_argmax_us": rival * 1e6} if rival else {}
    )


def walks(nodes: int) -> dict[str, Any]:
    """A walk along a path of 16."""
    ids, tree = torch.arange(nodes, device="cuda")[None], metadata_of([range(-1, nodes - 1)], nodes, CUDA)
    drawn, settings = ints(*range(1, nodes + 1))[None], draw_settings_of([SamplingParams()], CUDA)
    shapes = ((1, 16), (1,), (1, 16), (1,))
    got, want = (
        Outcome(*(torch.full(shape, -9, dtype=torch.int32, device="cuda") for shape in shapes)) for _ in range(2)
    )
    accept_walk(ids, tree, drawn, settings, got)
    PLAIN.accept_walk(ids, tree, drawn, settings, want)
    is_equal = are_equal(got, want)
    seconds = sweep([lambda: accept_walk(ids, tree, drawn, settings, got)] * 50)
    return {"kernel": "accept_walk", "rows": nodes, "us": seconds * 1e6, "equal": is_equal}


def candidates(sequences: int, width: int, temperature: float) -> dict[str, Any]:
    """`likeliest` over a block of 15 depths."""
    rows = sequences * DEPTHS
    batch = [x.view(sequences, DEPTHS, VOCABULARY) for x in logits_like(rows, copies(2 * rows * VOCABULARY))]
    settings = replace(
        tree_settings(sequences, 0),
        seeds=torch.arange(sequences, device="cuda") + 2**62,
        temperature=torch.full((sequences,), temperature, device="cuda"),
    )

    def poisoned() -> Candidates:
        ids = torch.full((sequences, DEPTHS, width), -7, dtype=torch.int32, device="cuda")
        return Candidates(ids, ids.float() * torch.nan, ids.float() * torch.nan)

    got, want, likeliest = poisoned(), poisoned(), Likeliest()
    likeliest(batch[0], settings, got)
    PLAIN_TREES.likeliest(batch[0], settings, want)
    differing = int((got.token_ids != want.token_ids).sum())
    is_equal = differing == 0 if temperature == 0 else differing <= rows * width // 100  # noise is float32's
    is_equal = is_equal and bool((got.scores - want.scores).abs().max() < 1e-3)
    seconds = sweep([lambda x=x: likeliest(x, settings, got) for x in batch])
    rival = sweep([lambda x=x: (x.topk(width, -1), x.float().logsumexp(-1)) for x in batch])
    return {
        "kernel": "likeliest", "sequences": sequences, "width": width, "temperature": temperature, "us": seconds * 1e6,
        "equal": is_equal, "ids_that_differ": differing, "torch_topk_and_logsumexp_us": rival * 1e6,
    }  # fmt: skip


def trees(sequences: int, budget: int) -> dict[str, Any]:
    """`best_first` with a width of 16."""
    scores = torch.randn(sequences, DEPTHS, 16, device="cuda").mul(2).log_softmax(-1).sort(-1, descending=True).values
    ids = torch.randint(0, VOCABULARY, scores.shape, dtype=torch.int32, device="cuda")
    n = budget + 1
    given, settings = Candidates(ids, scores, scores), tree_settings(sequences, budget)

    def poisoned() -> TreeNodes:
        a, b, c = (torch.full((sequences, n), -9, dtype=torch.int32, device="cuda") for _ in range(3))
        return TreeNodes(a, b, c, torch.full((sequences, n), torch.nan, device="cuda"), ints(*[-9] * sequences))

    got, want = poisoned(), poisoned()
    best_first(settings, given, got)
    PLAIN_TREES.best_first(settings, given, want)
    is_equal = are_equal(got, want)
    seconds = sweep([lambda: best_first(settings, given, got)] * 20)
    return {"kernel": "best_first", "sequences": sequences, "budget": budget, "us": seconds * 1e6, "equal": is_equal}


def main() -> None:
    """All of it; results as JSON."""
    path = result_path(__doc__, "sampling.json")
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
    write(path, {"copy_bandwidth_bytes_per_s": bandwidth, "rows": rows})
    wrong = [row for row in rows if not row["equal"]]
    print("ALL EQUAL" if not wrong else f"WRONG: {wrong}")


if __name__ == "__main__":
    main()
