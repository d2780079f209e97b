"""Trees from a block's logits without a way back to the host: candidates, noise and best-first search on the device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood.device.pinned_staging import PinnedStaging
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from draftwood.tree_options import TreeOptions

NODES = (16, 32, 64, 128, 256)  # of a tree, the root included
WIDTHS = (16, 64)


class TreeKernels:
    """The launchers of draft_service.kernels.triton, or their plain twins. Imports Triton."""

    def __init__(self, *, plain: bool) -> None:
        ranks, trees = (
            importlib.import_module(f"draft_service.kernels.triton.{name}") for name in ("likeliest", "best_first")
        )
        self.workspace: Callable[..., Any] = ranks.likeliest_workspace
        self.likeliest: Callable[..., None] = ranks.likeliest_plain if plain else ranks.likeliest
        self.best_first: Callable[..., None] = trees.best_first_trees_plain if plain else trees.best_first_trees


def width_of(options: TreeOptions) -> int:
    """Candidates a depth that a tree can use."""
    return min(options.width_cap, options.tree_budget) if options.algorithm == "ddtree" else 1


def is_for_device(options: TreeOptions, sampling: SamplingParams, vocab_size: int) -> bool:
    """Whether the kernels can make the tree: no biases, and no candidates to send beside it."""
    fits = options.tree_budget < NODES[-1] and width_of(options) <= min(WIDTHS[-1], vocab_size)
    return fits and not sampling.logit_bias and not options.num_candidates


class DeviceTrees:
    """The trees of one bucket: S sequences, W candidates a depth, trees of N nodes."""

    def __init__(
        self, kernels: TreeKernels, shape: tuple[int, int, int], width: int, num_nodes: int, device: torch.device
    ) -> None:
        """`shape` of the logits: S, depths, vocabulary."""
        s, depths, _ = shape
        i32, f32, each, tree = torch.int32, torch.float32, (s,), (s, num_nodes)
        self.kernels = kernels
        self.settings = PinnedStaging(
            {
                "seed": (each, torch.int64),
                "temperature": (each, f32),
                "base_length": (each, i32),
                "root": (each, i32),
                "budget": (each, i32),
                "width": (each, i32),
                "spine": (each, i32),
            },
            device,
        )
        self.trees = PinnedStaging(
            {
                "token_ids": (tree, i32),
                "parents": (tree, i32),
                "depths": (tree, i32),
                "log_probs": (tree, f32),
                "num_nodes": (each, i32),
            },
            device,
        )
        self._candidates = tuple(torch.zeros(s, depths, width, dtype=dtype, device=device) for dtype in (i32, f32, f32))
        self._workspace = kernels.workspace(s * depths, device)

    def write(self, wanted: Sequence[tuple[int, int, TreeOptions, SamplingParams]]) -> None:
        """The host's part: root, base length, options and sampling settings of each sequence."""
        host = self.settings.host
        self.settings.on_host.zero_()
        for i, (root, base_length, options, sampling) in enumerate(wanted):
            host["root"][i], host["base_length"][i] = root, base_length
            host["budget"][i], host["width"][i] = options.tree_budget, width_of(options)
            host["spine"][i] = options.spine and options.algorithm == "ddtree"
            if not sampling.is_greedy:
                host["temperature"][i] = sampling.temperature
                host["seed"][i] = np.uint64(sampling.seed).astype(np.int64)

    def run(self, logits: Tensor) -> None:
        """The device's part: from logits [S, depths, V] to the host's copy of the trees."""
        self.settings.send()
        of = self.settings.device
        noise = (of["temperature"], of["seed"], of["base_length"])
        self.kernels.likeliest(logits, *noise, self._candidates, self._workspace)
        options = (of["budget"], of["width"], of["spine"])
        self.kernels.best_first(of["root"], self._candidates, *options, tuple(self.trees.device.values()))
        self.trees.fetch()

    def read(self, count: int) -> list[DraftTree]:
        """The first trees, once the device has come to them."""
        host = self.trees.host
        parts = ("token_ids", "parents", "depths", "log_probs")
        trees: list[DraftTree] = []
        for i in range(count):
            n = int(host["num_nodes"][i])
            trees.append(DraftTree(*(tuple(host[part][i, :n].tolist()) for part in parts)))
        return trees
