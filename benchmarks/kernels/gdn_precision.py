"""How near Gated DeltaNet over a tree is to float64, in three regimes of keys, at Qwen3.6-27B's shape.

The oracle is the recurrence itself, node after node from its parent's state, in float64 on the same inputs; outputs of
the kernels are float32. `repeated` keys, nearly parallel and hardly forgotten, are what a model in a loop makes.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.trees import metadata_of, random_parents
from verify_service.kernels.arguments import LayerCommitInputs
from verify_service.kernels.triton.gdn_verify import GdnVerify

HK, HV, K, V = 16, 48, 128, 128
REGIMES = ("iid", "silu", "repeated")
BAR = 2e-6


def draw(regime: str, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """conv [1, N, C] in bfloat16, norms, g and beta [1, N, .], and a state [2, HV, V, K]."""
    q, k = (torch.randn(1, n, HK, K, device="cuda") for _ in range(2))
    g, beta = -torch.rand(1, n, HV, device="cuda"), torch.rand(1, n, HV, device="cuda")
    if regime == "silu":
        q, k = F.silu(q + 0.5), F.silu(k + 0.5)
    elif regime == "repeated":
        k = torch.randn(1, 1, HK, K, device="cuda") + 0.05 * k
        g, beta = 1e-3 * g, 0.97 + 0.02 * beta
    v = torch.randn(1, n, HV * V, device="cuda")
    conv = torch.cat([q.flatten(2), k.flatten(2), v], -1).bfloat16()
    norms = 1 / conv[..., : 2 * HK * K].double().unflatten(-1, (-1, K)).norm(dim=-1)
    return conv, norms.float(), g, beta, torch.randn(2, HV, V, K, device="cuda")


def recurrence(
    conv: Tensor, norms: Tensor, g: Tensor, beta: Tensor, state: Tensor, parents: list[int]
) -> Tensor:  # [N, HV, V] float64
    """Every node from its parent's state."""
    heads = (
        conv[0, :, : 2 * HK * K].double().unflatten(-1, (2, HK, K))
        * norms[0].double().unflatten(-1, (2, HK))[..., None]
    )
    q, k = heads.repeat_interleave(HV // HK, 2).unbind(1)
    v = conv[0, :, 2 * HK * K :].double().unflatten(-1, (HV, V))
    states: list[Tensor] = []
    outs: list[Tensor] = []
    for i, parent in enumerate(parents):
        s = (state if parent < 0 else states[parent]) * g[0, i].double().exp()[:, None, None]
        u = beta[0, i].double()[:, None] * (v[i] - (s @ k[i][..., None])[..., 0])
        states.append(s + u[..., None] * k[i][:, None])
        outs.append((states[-1] @ (q[i] * K**-0.5)[..., None])[..., 0])
    return torch.stack(outs)


def measure(trees: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Relative (Frobenius) errors of trees by name, of each regime."""
    found: list[dict[str, Any]] = []
    verify, nothing = GdnVerify(), torch.empty(0, device="cuda")
    for name, parents in trees.items():
        n = len(parents)
        tree = metadata_of([parents], n, nothing.device)  # in slot 1
        for regime in REGIMES:
            conv, norms, g, beta, states = draw(regime, n)
            out = torch.full((1, n, HV, V), torch.nan, device="cuda")
            verify(LayerCommitInputs(nothing, conv, norms, g, beta), tree, states, None, out)
            wanted = recurrence(conv, norms, g, beta, states[1].double(), parents)
            error = float((out[0].double() - wanted).norm() / wanted.norm())
            found.append({"tree": name, "nodes": n, "regime": regime, "error": error})
    return found


def trees_of(sizes: tuple[int, ...]) -> dict[str, list[int]]:
    """Trees as drafts have them, and chains of the path's limit, of 64 and of a prompt's pass."""
    trees = {f"tree of {n}": random_parents(random.Random(n), n) for n in sizes}
    return trees | {f"chain of {n}": list(range(-1, n - 1)) for n in (16, 64, 256)}
