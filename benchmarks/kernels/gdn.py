"""Times of Gated DeltaNet layers at Qwen3.6-27B's shape: 16 key and 48 value heads of 128, bfloat16 in and out.

    python -m benchmarks.kernels.gdn --out benchmarks/results/h200

Every row is checked before it is timed, its float32 outputs against float64. Floors count the bytes that have to move
over the copy bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import gdn_precision
from benchmarks.kernels.gdn_rivals import sequential_chain, state_per_node
from benchmarks.kernels.timing import copy_bandwidth, graph_seconds, sweep, write
from benchmarks.kernels.trees import metadata_of, random_parents
from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import GDN, RecurrentShape
from verify_service.kernels.arguments import (
    Convolution,
    GatedNorm,
    Gates,
    LayerCommitInputs,
    Outcome,
    TreeMetadata,
)
from verify_service.kernels.reference import commit as commit_reference
from verify_service.kernels.reference import gdn_verify as verify_reference
from verify_service.kernels.triton.commit import recurrent_commit
from verify_service.kernels.triton.conv_gate import conv_gate
from verify_service.kernels.triton.gdn_verify import GdnVerify

HK, HV, K, V, KERNEL_SIZE = 16, 48, 128, 128, 4
C = 2 * HK * K + HV * V
LAYERS = 48
SHAPES = ((1, 64), (1, 32), (8, 64), (8, 32), (1, 1), (8, 1), (1, 16), (8, 16), (1, 128), (1, 256))  # batch, nodes
STATE = HV * V * K * 4  # bytes
SHAPE, CUDA = RecurrentShape(GDN, HK, HV, K, V, C, KERNEL_SIZE), torch.device("cuda")


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@dataclass(frozen=True, slots=True)
class Pass:
    """Inputs and outputs of all layers of a step."""

    tree: TreeMetadata
    projections: list[Tensor]  # [B, N, q | k | v | z | b | a]
    convolution: Convolution
    gates: tuple[Tensor, Tensor]  # decay and dt_bias, [HV] each
    norm_weight: Tensor
    pools: Pools
    commit_inputs: CommitInputs
    out: Tensor

    @classmethod
    def draw(cls, b: int, n: int) -> Pass:
        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(shape, device="cuda").to(dtype)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(shape, torch.nan, device="cuda", dtype=dtype)

        trees = [random_parents(random.Random(n + i), n) for i in range(b)]
        nothing = torch.empty(0, device="cuda")
        states = normal(LAYERS, b + 1, HV, V, K, dtype=torch.float32) * 0.1
        windows = normal(LAYERS, b + 1, KERNEL_SIZE - 1, C)
        return cls(
            metadata_of(trees, n, CUDA),
            [normal(b, n, C + HV * V + 2 * HV) for _ in range(4)],
            Convolution(normal(KERNEL_SIZE, C, dtype=torch.float32)),
            (-torch.rand(HV, device="cuda"), normal(HV, dtype=torch.float32)),
            normal(V),
            Pools(nothing, nothing, nothing, states, windows),
            CommitInputs(
                keys=nothing,
                values=nothing,
                inputs=empty(LAYERS, b, n, C, dtype=torch.bfloat16),
                conv=empty(LAYERS, b, n, C, dtype=torch.bfloat16),
                norms=empty(LAYERS, b, n, 2 * HK),
                g=empty(LAYERS, b, n, HV),
                beta=empty(LAYERS, b, n, HV),
            ),
            empty(b, n, HV, V, dtype=torch.bfloat16),
        )

    def parts(self, layer: int) -> tuple[Tensor, ...]:
        return self.projections[layer % 4].split([C, HV * V, HV, HV], -1)

    def layer(self, layer: int) -> LayerCommitInputs:
        left = self.commit_inputs
        return LayerCommitInputs(*(t[layer] for t in (left.inputs, left.conv, left.norms, left.g, left.beta)))

    def conv(self, layer: int) -> None:
        x, _, write_gate, step = self.parts(layer)
        gates = Gates(step, write_gate, *self.gates)
        windows = self.pools.windows[layer]
        conv_gate(x, self.tree, windows, self.convolution, gates, self.layer(layer), key_dim=K)

    def norm(self, layer: int) -> GatedNorm:
        return GatedNorm(self.parts(layer)[1], self.norm_weight, 1e-6)


def errors(step: Pass, verify: GdnVerify) -> dict[str, float]:
    """Of layer 0: float32 outputs against float64, and bfloat16 ones after the norm against the twin's."""
    found: dict[str, float] = {}
    narrow = (torch.bfloat16, torch.bfloat16)
    for name, dtypes, norm in (("error", (torch.float32, torch.float64), None), ("normed_error", narrow, step.norm(0))):
        got, wanted = [torch.full(step.out.shape, torch.nan, device="cuda", dtype=dtype) for dtype in dtypes]
        inputs = (step.layer(0), step.tree, step.pools.states[0], norm)
        verify(*inputs, got)
        verify_reference.gdn_verify(*inputs, wanted)
        found[name] = relative(got, wanted)
    return found


def measure_verify(b: int, n: int, bandwidth: float) -> tuple[dict[str, Any], Pass]:
    """Convolution, gates and verify of all layers; the norm beside them."""
    step, launch = Pass.draw(b, n), GdnVerify()
    scratch = launch.scratch(b, n, HV, V, step.out.device)

    def verify(layer: int, norm: GatedNorm | None = None) -> None:
        launch(step.layer(layer), step.tree, step.pools.states[layer], norm, step.out)

    def run(norm: bool) -> None:
        for layer in range(LAYERS):
            step.conv(layer)
            verify(layer, step.norm(layer) if norm else None)

    for layer in range(LAYERS):
        step.conv(layer)
    checked = errors(step, launch)
    size = b * (STATE + n * (3 * C * 2 + HV * V * 2))
    result = {
        "batch": b,
        "nodes": n,
        "conv_us": sweep([lambda layer=layer: step.conv(layer) for layer in range(LAYERS)]) * 1e6,
        "verify_us": sweep([lambda layer=layer: verify(layer) for layer in range(LAYERS)]) * 1e6,
        "all_layers_ms": graph_seconds(lambda: run(False)) * 1e3,
        "all_layers_with_norm_ms": graph_seconds(lambda: run(True)) * 1e3,
        "floor_ms": LAYERS * size / bandwidth * 1e3,
        "scratch_mib": sum(t.nbytes for t in (scratch.matrices, scratch.factors, scratch.solve, scratch.carried))
        / 2**20,
        **checked,
    }
    return result, step


def measure_commit(step: Pass, length: int, bandwidth: float) -> dict[str, Any]:
    """All layers in one launch; two layers of it checked, and their bits after token by token."""
    b, nothing = step.tree.parents.shape[0], torch.empty(0, device="cuda")
    path = torch.arange(16, dtype=torch.int32, device="cuda").repeat(b, 1)
    outcome = Outcome(path, torch.full((b,), length, dtype=torch.int32, device="cuda"), nothing, nothing)
    left, pools = step.commit_inputs, step.pools
    two = CommitInputs(nothing, nothing, *(t[:2] for t in (left.inputs, left.conv, left.norms, left.g, left.beta)))
    at_once, plain, one_by_one = (
        replace(pools, states=pools.states[:2].clone(), windows=pools.windows[:2].clone()) for _ in range(3)
    )
    recurrent_commit(SHAPE, two, outcome, at_once, step.tree)
    commit_reference.recurrent_commit(SHAPE, two, outcome, plain, step.tree)
    for i in range(length):
        one = replace(outcome, path=path.roll(-i, 1), path_length=torch.ones_like(outcome.path_length))
        recurrent_commit(SHAPE, two, one, one_by_one, step.tree)
    before = pools.states.clone()
    seconds = graph_seconds(lambda: recurrent_commit(SHAPE, left, outcome, pools, step.tree))
    pools.states.copy_(before)
    is_same = torch.equal(at_once.states, one_by_one.states) and torch.equal(at_once.windows, one_by_one.windows)
    return {
        "batch": b,
        "path": length,
        "ms": seconds * 1e3,
        "floor_ms": 2 * LAYERS * b * STATE / bandwidth * 1e3,
        "error": relative(at_once.states, plain.states),
        "same_bits_token_by_token": is_same,
    }


def measure_rivals(step: Pass, verify_us: float, scratch_mib: float, bandwidth: float) -> dict[str, Any]:
    """Of one request of 64 nodes, per layer."""
    n = step.tree.parents.shape[1]
    nodes = torch.full((1, HV, n, V, K), torch.nan, device="cuda")
    outs = [torch.full(step.out.shape, torch.nan, device="cuda") for _ in range(2)]

    def rival(layer: int, out: Tensor) -> None:
        state_per_node(step.layer(layer), step.tree, step.pools.states[layer], nodes, out)

    GdnVerify()(step.layer(0), step.tree, step.pools.states[0], None, outs[0])
    rival(0, outs[1])
    us = sweep([lambda layer=layer: rival(layer, step.out) for layer in range(LAYERS)]) * 1e6
    floor = 2 * n * STATE / bandwidth * 1e6
    # Scratch serves all layers; what a commit needs is kept by each, as are a rival's states and windows of nodes.
    left = step.commit_inputs
    kept = sum(t.nbytes for t in (left.conv, left.norms, left.g, left.beta)) / 2**20 + scratch_mib
    states = LAYERS * nodes.nbytes / 2**20
    windows, inputs = LAYERS * n * (KERNEL_SIZE - 1) * C * 2 / 2**20, left.inputs.nbytes / 2**20
    result: dict[str, Any] = {
        "state_per_node_us": us,
        "state_per_node_floor_us": floor,
        "state_per_node_error": relative(outs[1], outs[0]),
        "times_state_per_node": us / verify_us,
        "memory_mib": kept,
        "state_per_node_mib": states,
        "times_less_memory": states / kept,
        "times_less_memory_with_convolution": (states + windows) / (kept + inputs),
    }
    calls = sequential_chain(n, (HK, HV), (K, V), LAYERS)
    if calls is not None:
        chain = sweep(calls) * 1e6
        result |= {"fla_chain_us": chain, "times_fla_chain": chain / verify_us}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("measures on a GPU, and torch finds none here")
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    result: dict[str, Any] = {"copy_tb_s": bandwidth / 1e12, "verify": [], "commit": []}
    result["precision"] = gdn_precision.measure(gdn_precision.trees_of((32, 64, 128, 256)))
    worst = max(row["error"] for row in result["precision"])
    print(f"worst error {worst:.3g} of {len(result['precision'])}, bar {gdn_precision.BAR}", flush=True)
    for b, n in SHAPES:
        row, step = measure_verify(b, n, bandwidth)
        result["verify"].append(row)
        print(row, flush=True)
        if n == 64:
            for length in (1, 7, 16):
                result["commit"].append(measure_commit(step, length, bandwidth))
                print(result["commit"][-1], flush=True)
        del step
        write(options.out / "gdn.json", result)
    step = Pass.draw(1, 64)
    for layer in range(LAYERS):
        step.conv(layer)
    row = next(row for row in result["verify"] if (row["batch"], row["nodes"]) == (1, 64))
    result["rivals"] = measure_rivals(step, row["verify_us"], row["scratch_mib"], bandwidth)
    print(result["rivals"], flush=True)
    write(options.out / "gdn.json", result)


if __name__ == "__main__":
    main()
