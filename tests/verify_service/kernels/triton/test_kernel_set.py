"""Whole steps through the kernels: prefill, trees, commits and draws give what their plain twins give."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from tests.verify_service.harness import SteppedRunner, config_of
from tests.verify_service.models import save_tiny
from verify_service.kernels.kernel_set import KernelSet
from verify_service.kernels.reference.kernel_set import PLAIN
from verify_service.kernels.triton.kernel_set import TritonKernels

LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
}


def answers(directory: Path, kernels: KernelSet) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """A greedy and a sampled sequence after a step with trees and one without."""
    bench = SteppedRunner(config_of(directory, page_size=16, max_batch=2, max_context=64), kernels)
    noisy = SamplingParams(temperature=0.9, top_k=40, seed=2**63 + 1)
    first = bench.begin([5, 77, 30, 41, 9], 20, algorithm="ddtree", tree_budget=7)
    second = bench.begin([9, 8, 7], 20, algorithm="ddtree", tree_budget=7, sampling=noisy)
    both = [first, second]
    trees = {s.sequence_id: DraftTree.from_nodes(s.root, [9, 30, 31, 9], [0, 0, 1, 3], [-1.0] * 4) for s in both}
    assert bench.step(both, trees) == bench.step(both, {}) == []
    return [s.answer for s in both], bench.committed(first)


@pytest.mark.parametrize("name", LAYERS)
def test_steps_equal_those_of_the_twins(tmp_path: Path, name: str) -> None:
    torch.set_num_threads(1)
    save_tiny(name, tmp_path, **LAYERS[name])
    (tokens, committed), (wanted, state) = (answers(tmp_path, kernels) for kernels in (TritonKernels(), PLAIN))
    assert tokens == wanted
    for part, tensor in state.items():
        torch.testing.assert_close(committed[part], tensor, rtol=1e-3, atol=1e-3, msg=part)
