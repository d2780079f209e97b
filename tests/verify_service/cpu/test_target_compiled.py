"""Compiled passes give what eager ones give, in every shape that a step may have."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood.tree import DraftTree
from tests.verify_service.models import save_tiny
from verify_service.cache.pages import PageAllocator, SlotAllocator
from verify_service.cache.pools import allocate_pools
from verify_service.cpu.step_inputs import StepInputs, StepRow, build_step_inputs
from verify_service.cpu.target import PassOutputs, TreeTarget
from verify_service.model.loading import load_target
from verify_service.model.target import TargetParts

CPU = torch.device("cpu")
# Sequences and nodes: what warms up, as in the service, and what comes then.
ALONE = (((1, 1), (1, 8)), ((1, 1), (1, 6), (1, 2), (1, 33), (1, 1)))
SEVERAL = (((2, 8),), ((2, 6), (3, 1), (5, 1), (4, 9), (2, 1), (3, 17)))
GDN, BOTH, WINDOWS = (
    ("linear_attention",),
    ("linear_attention", "full_attention"),
    ("sliding_attention", "full_attention"),
)
Shapes = tuple[tuple[int, int], ...]


def step_of(num_sequences: int, num_nodes: int, rng: random.Random) -> StepInputs:
    """Random trees behind prefixes of random lengths."""
    rows: list[StepRow] = []
    for i in range(num_sequences):
        parents = [max(0, node - rng.randint(1, 3)) for node in range(1, num_nodes)]
        tokens = rng.sample(range(250), num_nodes)
        tree = DraftTree.from_nodes(tokens[0], tokens[1:], parents, [-1.0] * len(parents))
        slots = np.arange(1 + 100 * i, 101 + 100 * i)
        rows.append(StepRow(tree, rng.randint(1, 90), slots, i + 1))
    return build_step_inputs(rows, kernel_size=4)


def check(compiled: TreeTarget, eager: TreeTarget, step: StepInputs) -> None:
    """The same hidden states and the same commit inputs."""
    outputs: list[PassOutputs] = [target.run(step) for target in (compiled, eager)]
    torch.testing.assert_close(outputs[0].hidden, outputs[1].hidden, rtol=1e-4, atol=1e-4)
    for name in ("keys", "values", "inputs", "conv", "norms", "g", "beta"):
        ours, wanted = (getattr(o.commit_inputs, name) for o in outputs)
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.timeout(400)  # graphs are compiled anew
@pytest.mark.parametrize(
    ("family", "layers", "shapes"),
    [
        pytest.param("qwen3_5_text", GDN, SEVERAL, id="gated delta net-several"),
        pytest.param("qwen3_5_text", BOTH, ALONE, marks=pytest.mark.slow, id="qwen3_5_text-alone"),
        pytest.param("qwen3_5_text", BOTH, SEVERAL, marks=pytest.mark.slow, id="qwen3_5_text-several"),
        pytest.param("gemma3_text", WINDOWS, ALONE, marks=pytest.mark.slow, id="gemma3_text-alone"),
        pytest.param("gemma3_text", WINDOWS, SEVERAL, marks=pytest.mark.slow, id="gemma3_text-several"),
    ],
)
@torch.inference_mode()
def test_compiled_passes_equal_eager_ones(
    family: str,
    layers: tuple[str, ...],
    shapes: tuple[Shapes, Shapes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))
    warm, later = shapes
    save_tiny(family, tmp_path, num_hidden_layers=len(layers), layer_types=list(layers))
    spec = load_target(tmp_path, torch.float32, CPU)[1]
    pools = allocate_pools(spec, PageAllocator(1023, 1), SlotAllocator(7), 64, torch.float32, CPU)
    torch.manual_seed(0)
    for pool in (pools.keys, pools.values, pools.windows, pools.states):
        pool.normal_(std=0.3)
    compiled, eager = (
        TreeTarget(TargetParts(*load_target(tmp_path, torch.float32, CPU), pools, (len(layers) - 1,), 256, is_compiled))
        for is_compiled in (True, False)
    )
    rng = random.Random(0)
    compiled.is_warming = True
    for shape in warm:
        compiled.run(step_of(*shape, rng))
    compiled.is_warming = False
    for shape in later:
        check(compiled, eager, step_of(*shape, rng))
