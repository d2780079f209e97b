"""The engine's kernels out of verify_service.kernels.triton."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import GDN, MAMBA2, RecurrentShape
from verify_service.kernels.arguments import Draws, Outcome, TreeMetadata
from verify_service.kernels.kernel_set import KernelSet


def triton_set() -> KernelSet:
    """The launchers. Imports Triton."""
    kernels = _Kernels()
    return KernelSet(
        is_capturable=True,
        tree_metadata=kernels.tree_metadata,
        conv_gate=kernels.conv_gate,
        gdn_verify=kernels.gdn_verify,
        mamba2_conv_gate=kernels.mamba2_conv_gate,
        mamba2_verify=kernels.mamba2_verify,
        add_norm=kernels.of("add_norm"),
        swiglu=kernels.of("swiglu", "add_norm"),
        rotate_heads=kernels.of("rotate_heads"),
        tree_attention=kernels.tree_attention,
        recurrent_commit=kernels.recurrent_commit,
        kv_commit=kernels.kv_commit,
        sample=kernels.sample,
        accept_walk=kernels.accept_walk,
    )


@cache
def _module(name: str) -> Any:
    return importlib.import_module(f"verify_service.kernels.triton.{name}")


class _Kernels:
    """Gives each kernel its arguments in its own form, and keeps scratch memory, which captured graphs hold on to."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def of(self, name: str, module: str | None = None) -> Callable[..., None]:
        """The launcher."""
        return getattr(_module(module or name), name)

    def _scratch(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def tree_metadata(self, s: TreeMetadata) -> None:
        derived = (s.positions, s.ancestors, s.depths, s.tree_depth, s.block_depth)
        self.of("tree_metadata")(s.parents, s.num_nodes, s.base_lengths, *derived)

    def conv_gate(
        self,
        projected: Tensor,
        parents: Tensor,
        windows: Tensor,
        state_slots: Tensor,
        weight: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        inputs: Tensor,
        conv: Tensor,
        norms: Tensor,
        g: Tensor,
        beta: Tensor,
        key_dim: int,
    ) -> None:
        hv = g.shape[-1]
        b, a = projected[..., -2 * hv : -hv], projected[..., -hv:]
        gates = _module("conv_gate").Gates(a, b, decay, dt_bias, g, beta)
        x = projected[..., : inputs.shape[-1]]
        common = (x, parents, windows, state_slots, weight, None, inputs, conv)
        self.of("conv_gate")(*common, norms=norms, key_dim=key_dim, gates=gates)

    def gdn_verify(
        self,
        conv: Tensor,
        norms: Tensor,
        g: Tensor,
        beta: Tensor,
        s: TreeMetadata,
        states: Tensor,
        out: Tensor,
        norm: tuple[Tensor, Tensor, float],
    ) -> None:
        module = _module("gdn_verify")
        b, n = conv.shape[:2]
        scratch = self._scratch(
            ("gdn", b, n), lambda: module.gdn_scratch(b, n, states.shape[1], states.shape[2], conv.device)
        )
        leaving = (out, scratch, module.GatedNorm(*norm))
        self.of("gdn_verify")(conv, norms, g, beta, s.ancestors, states, s.state_slots, *leaving)

    def mamba2_conv_gate(
        self,
        xbc: Tensor,
        dt: Tensor,
        parents: Tensor,
        windows: Tensor,
        state_slots: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        decay: Tensor,
        dt_bias: Tensor,
        limits: tuple[float, float],
        inputs: Tensor,
        conv: Tensor,
        g: Tensor,
        beta: Tensor,
    ) -> None:
        gates = _module("conv_gate").Gates(dt, None, decay, dt_bias, g, beta, limits)
        self.of("conv_gate")(xbc, parents, windows, state_slots, weight, bias, inputs, conv, gates=gates)

    def mamba2_verify(
        self, conv: Tensor, g: Tensor, beta: Tensor, s: TreeMetadata, states: Tensor, skip: Tensor, out: Tensor
    ) -> None:
        self.of("mamba2_verify")(conv, g, beta, s.ancestors, states, s.state_slots, skip, out)

    def tree_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        s: TreeMetadata,
        page_size: int,
        scaling: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        pages = (s.page_table, page_size, s.base_lengths, s.ancestors, s.positions)
        optional = (sliding_window, soft_cap, sinks)
        self.of("tree_attention")(q, k, v, key_pool, value_pool, *pages, scaling, out, *optional)

    def recurrent_commit(
        self, shape: RecurrentShape, commit_inputs: CommitInputs, outcome: Outcome, pools: Pools, s: TreeMetadata
    ) -> None:
        recurrent = None
        if shape.kind in (GDN, MAMBA2):
            norms = commit_inputs.norms if shape.kind == GDN else None
            recurrent = _module("recurrent_commit").RecurrentInputs(
                commit_inputs.conv, norms, commit_inputs.g, commit_inputs.beta
            )
        path = (outcome.path, outcome.path_length)
        self.of("recurrent_commit")(recurrent, commit_inputs.inputs, *path, pools.states, pools.windows, s.state_slots)

    def kv_commit(
        self, commit_inputs: CommitInputs, outcome: Outcome, pools: Pools, s: TreeMetadata, page_size: int
    ) -> None:
        path = (outcome.path, outcome.path_length, s.base_lengths, s.page_table, page_size)
        self.of("kv_commit")(commit_inputs.keys, commit_inputs.values, *path, pools.keys, pools.values)

    def sample(self, logits: Tensor, s: TreeMetadata, d: Draws, drawn: Tensor, has_filters: bool) -> None:
        module = _module("sample")
        rows = logits.shape[0] * logits.shape[1]
        workspace = self._scratch(("sample", rows), lambda: module.sample_workspace(rows, torch.device(logits.device)))
        sampling = module.RowSampling(d.temperature, d.top_k, d.top_p, d.min_p, d.seeds)
        self.of("sample")(logits, s.positions, s.num_nodes, sampling, drawn, workspace, has_filters=has_filters)

    def accept_walk(self, input_ids: Tensor, s: TreeMetadata, drawn: Tensor, d: Draws, outcome: Outcome) -> None:
        result = (outcome.path, outcome.path_length, outcome.tokens, outcome.finish)
        self.of("accept_walk")(input_ids, s.parents, s.num_nodes, drawn, d.stop_ids, d.remaining, result)
