"""What the kernels compute, written straight from the formulas in float64: one path, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
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
class GdnInputs:
    """Inputs of Gated DeltaNet for B trees of N nodes, float32."""

    q: Tensor  # [B, N, HK, K], L2-normalised
    k: Tensor  # [B, N, HK, K], L2-normalised
    v: Tensor  # [B, N, HV, V]
    g: Tensor  # [B, N, HV]
    beta: Tensor  # [B, N, HV]
    state: Tensor  # [B, HV, V, K]

    @classmethod
    def draw(cls, seed: int, regime: str, b: int, n: int, heads: tuple[int, int], dims: tuple[int, int]) -> Self:
        """Random inputs; `repeated` keys are what a model in a loop makes: nearly parallel, hardly forgotten."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        def unit(x: Tensor) -> Tensor:
            return x / x.norm(dim=-1, keepdim=True)

        (hk, hv), (dk, dv) = heads, dims
        q, k = normal(b, n, hk, dk), normal(b, n, hk, dk)
        g = -torch.rand(b, n, hv, generator=generator)
        beta = torch.rand(b, n, hv, generator=generator)
        if regime == "silu":
            q, k = torch.nn.functional.silu(q + 0.5), torch.nn.functional.silu(k + 0.5)
        elif regime == "repeated":
            k = normal(b, 1, hk, dk) + 0.05 * k
            g, beta = 1e-3 * g, 0.97 + 0.02 * beta
        return cls(unit(q), unit(k), normal(b, n, hv, dv), g, beta, normal(b, hv, dv, dk))

    def pick(self, row: int, nodes: Sequence[int]) -> Self:
        """The inputs of some nodes of one row, as a batch of one."""
        index = list(nodes)
        q, k, v, g, beta = (getattr(self, spec.name)[row : row + 1, index] for spec in fields(self)[:-1])
        return type(self)(q, k, v, g, beta, self.state[row : row + 1])


def gdn_token(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token of the recurrence: [HV, V, K] from [HK, K], [HV, V], [HV], [HV]; any format."""
    keys = k.repeat_interleave(v.shape[0] // k.shape[0], 0)  # [HV, K]
    state = g.exp()[:, None, None] * state
    u = beta[:, None] * (v - (state @ keys[..., None])[..., 0])
    return state + u[..., None] * keys[:, None]


def gdn_paths(x: GdnInputs, trees: Sequence[Sequence[int]]) -> Tensor:
    """Outputs [B, N, HV, V] of every node of the trees: the recurrence along its path, in float64."""
    q, k, v, g, beta, start = (getattr(x, spec.name).double() for spec in fields(x))
    group, scale = v.shape[2] // k.shape[2], k.shape[3] ** -0.5
    out = torch.full(v.shape, torch.nan, dtype=torch.float64)
    for b, parents in enumerate(trees):
        states: list[Tensor] = []
        for i, parent in enumerate(parents):
            before = start[b] if parent < 0 else states[parent]
            states.append(gdn_token(before, k[b, i], v[b, i], g[b, i], beta[b, i]))
            query = q[b, i].repeat_interleave(group, 0) * scale
            out[b, i] = (states[-1] @ query[..., None])[..., 0]
    return out


@dataclass(frozen=True, slots=True)
class Mamba2Inputs:
    """Inputs of Mamba2 for B trees of N nodes, float32."""

    c: Tensor  # [B, N, HK, K]
    b: Tensor  # [B, N, HK, K]
    x: Tensor  # [B, N, HV, V]
    g: Tensor  # [B, N, HV]
    dt: Tensor  # [B, N, HV]
    state: Tensor  # [B, HV, V, K]

    @classmethod
    def draw(cls, seed: int, regime: str, b: int, n: int, heads: tuple[int, int], dims: tuple[int, int]) -> Self:
        """Random inputs; under `repeated` keys are nearly parallel and hardly anything is forgotten."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        (hk, hv), (dk, dv) = heads, dims
        queries, keys, x = normal(b, n, hk, dk), normal(b, n, hk, dk), normal(b, n, hv, dv)
        dt = torch.nn.functional.softplus(normal(b, n, hv))
        g = -dt * torch.arange(1, hv + 1)
        if regime == "silu":
            queries, keys, x = (torch.nn.functional.silu(t + 0.5) for t in (queries, keys, x))
        elif regime == "repeated":
            keys, g = normal(b, 1, hk, dk) + 0.05 * keys, 1e-3 * g
        return cls(queries, keys, x, g, dt, normal(b, hv, dv, dk))

    def pick(self, row: int, nodes: Sequence[int]) -> Self:
        """The inputs of some nodes of one row, as a batch of one."""
        index = list(nodes)
        c, b, x, g, dt = (getattr(self, spec.name)[row : row + 1, index] for spec in fields(self)[:-1])
        return type(self)(c, b, x, g, dt, self.state[row : row + 1])


def mamba2_token(state: Tensor, b: Tensor, x: Tensor, g: Tensor, dt: Tensor) -> Tensor:
    """One token of the recurrence: [HV, V, K] from [HK, K], [HV, V], [HV], [HV]; any format."""
    keys = b.repeat_interleave(x.shape[0] // b.shape[0], 0)  # [HV, K]
    return g.exp()[:, None, None] * state + (dt[:, None] * x)[..., None] * keys[:, None]


def mamba2_paths(inputs: Mamba2Inputs, trees: Sequence[Sequence[int]]) -> Tensor:
    """Outputs [B, N, HV, V] of every node of the trees from a state of its own, in float64."""
    c, b, x, g, dt, start = (getattr(inputs, spec.name).double() for spec in fields(inputs))
    out = torch.full(x.shape, torch.nan, dtype=torch.float64)
    for row, parents in enumerate(trees):
        states: list[Tensor] = []
        for i, parent in enumerate(parents):
            before = start[row] if parent < 0 else states[parent]
            states.append(mamba2_token(before, b[row, i], x[row, i], g[row, i], dt[row, i]))
            query = c[row, i].repeat_interleave(x.shape[2] // b.shape[2], 0)
            out[row, i] = (states[-1] @ query[..., None])[..., 0]
    return out


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Frobenius norm of the difference over that of what is wanted."""
    return float((got.double() - wanted).norm() / wanted.norm())
