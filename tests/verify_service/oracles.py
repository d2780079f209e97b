"""What the kernels compute, written straight from the formulas in float64: one path, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

REGIMES = ("iid", "silu", "repeated")


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def masks(trees: Sequence[Sequence[int]], num_nodes: int) -> tuple[Tensor, Tensor]:
    """`ancestor_mask` and `ancestor_bias` [B, N, N] of the trees, nodes beyond a tree seeing only themselves."""
    ancestor_mask = torch.zeros(len(trees), num_nodes, num_nodes)
    for b, parents in enumerate(trees):
        for i in range(num_nodes):
            seen = path_to(parents, i) if i < len(parents) else [i]
            ancestor_mask[b, i, seen] = 1.0
    return ancestor_mask, torch.zeros_like(ancestor_mask).masked_fill_(ancestor_mask == 0, -torch.inf)


@dataclass(frozen=True, slots=True)
class RecurrentInputs:
    """Inputs of a recurrent layer for B trees of N nodes, float32. Of Mamba2 they are C, B, x, g and dt."""

    q: Tensor  # [B, N, HK, K], L2-normalised in Gated DeltaNet
    k: Tensor  # [B, N, HK, K], L2-normalised in Gated DeltaNet
    v: Tensor  # [B, N, HV, V]
    g: Tensor  # [B, N, HV]
    beta: Tensor  # [B, N, HV]
    state: Tensor  # [B, HV, V, K]

    def pick(self, row: int, nodes: Sequence[int]) -> Self:
        """The inputs of some nodes of one row, as a batch of one."""
        index = list(nodes)
        q, k, v, g, beta = (getattr(self, spec.name)[row : row + 1, index] for spec in fields(self)[:-1])
        return type(self)(q, k, v, g, beta, self.state[row : row + 1])


def draw_gdn(seed: int, regime: str, b: int, n: int, heads: tuple[int, int], dims: tuple[int, int]) -> RecurrentInputs:
    """Random inputs of Gated DeltaNet with HK, HV heads of K, V. Under `repeated` keys are what a model in a loop
    makes: nearly parallel, hardly forgotten."""
    generator, (hk, hv), (dk, dv) = torch.Generator().manual_seed(seed), heads, dims

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    q, k = (torch.randn(b, n, hk, dk, generator=generator) for _ in range(2))
    g = -torch.rand(b, n, hv, generator=generator)
    beta = torch.rand(b, n, hv, generator=generator)
    if regime == "silu":
        q, k = torch.nn.functional.silu(q + 0.5), torch.nn.functional.silu(k + 0.5)
    elif regime == "repeated":
        k = torch.randn(b, 1, hk, dk, generator=generator) + 0.05 * k
        g, beta = 1e-3 * g, 0.97 + 0.02 * beta
    v, state = (torch.randn(size, generator=generator) for size in ((b, n, hv, dv), (b, hv, dv, dk)))
    return RecurrentInputs(unit(q), unit(k), v, g, beta, state)


def draw_mamba2(
    seed: int, regime: str, b: int, n: int, heads: tuple[int, int], dims: tuple[int, int]
) -> RecurrentInputs:
    """Random inputs of Mamba2 with HK groups, HV heads of K, V. Under `repeated` keys are nearly parallel and hardly
    anything is forgotten."""
    generator, (hk, hv), (dk, dv) = torch.Generator().manual_seed(seed), heads, dims
    q, k, v = (torch.randn(size, generator=generator) for size in ((b, n, hk, dk), (b, n, hk, dk), (b, n, hv, dv)))
    dt = torch.nn.functional.softplus(torch.randn(b, n, hv, generator=generator))
    g = -dt * torch.arange(1, hv + 1)
    if regime == "silu":
        q, k, v = (torch.nn.functional.silu(t + 0.5) for t in (q, k, v))
    elif regime == "repeated":
        k, g = torch.randn(b, 1, hk, dk, generator=generator) + 0.05 * k, 1e-3 * g
    return RecurrentInputs(q, k, v, g, dt, torch.randn(b, hv, dv, dk, generator=generator))


def gdn_token(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token of the recurrence: [HV, V, K] from [HK, K], [HV, V], [HV], [HV]; any format."""
    keys = k.repeat_interleave(v.shape[0] // k.shape[0], 0)  # [HV, K]
    state = g.exp()[:, None, None] * state
    u = beta[:, None] * (v - (state @ keys[..., None])[..., 0])
    return state + u[..., None] * keys[:, None]


def mamba2_token(state: Tensor, b: Tensor, x: Tensor, g: Tensor, dt: Tensor) -> Tensor:
    """One token of the recurrence: [HV, V, K] from [HK, K], [HV, V], [HV], [HV]; any format."""
    keys = b.repeat_interleave(x.shape[0] // b.shape[0], 0)  # [HV, K]
    return g.exp()[:, None, None] * state + (dt[:, None] * x)[..., None] * keys[:, None]


def paths(
    x: RecurrentInputs, trees: Sequence[Sequence[int]], token: Callable[..., Tensor], scale: float = 1.0
) -> Tensor:
    """Outputs [B, N, HV, V] of every node of the trees: the recurrence `token` along its path, in float64."""
    q, k, v, g, beta, start = (getattr(x, spec.name).double() for spec in fields(x))
    out = torch.full(v.shape, torch.nan, dtype=torch.float64)
    for b, parents in enumerate(trees):
        states: list[Tensor] = []
        for i, parent in enumerate(parents):
            before = start[b] if parent < 0 else states[parent]
            states.append(token(before, k[b, i], v[b, i], g[b, i], beta[b, i]))
            query = q[b, i].repeat_interleave(v.shape[2] // k.shape[2], 0) * scale
            out[b, i] = (states[-1] @ query[..., None])[..., 0]
    return out


def gdn_paths(x: RecurrentInputs, trees: Sequence[Sequence[int]]) -> Tensor:
    """The outputs of Gated DeltaNet, which scales its queries."""
    return paths(x, trees, gdn_token, x.k.shape[3] ** -0.5)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Frobenius norm of the difference over that of what is wanted."""
    return float((got.double() - wanted).norm() / wanted.norm())
