"""Trees from a block's logits without a way back to the host: candidates, noise and best-first search on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draft_service.kernels.arguments import Candidates, TreeNodes, TreeSettings
from draft_service.kernels.kernel_set import KernelSet
from draftwood.device.pinned_staging import PinnedStaging
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from draftwood.tree_options import TreeOptions

NODES = (16, 32, 64, 128, 256)  # of a tree, the root included
WIDTHS = (16, 64)


def width_of(options: TreeOptions) -> int:
    """Candidates per depth that a tree can use."""
    return min(options.width_cap, options.tree_budget) if options.algorithm == "ddtree" else 1


def is_for_device(options: TreeOptions, sampling: SamplingParams, vocab_size: int) -> bool:
    """Whether the kernels can make the tree: no biases, and no candidates to send beside it."""
    fits = options.tree_budget < NODES[-1] and width_of(options) <= min(WIDTHS[-1], vocab_size)
    return fits and not sampling.logit_bias and not options.num_candidates


class DeviceTrees:
    """The trees of one bucket: S sequences, W candidates per depth, trees of N nodes."""

    def __init__(
        self, kernels: KernelSet, shape: tuple[int, int, int], width: int, num_nodes: int, device: torch.device
    ) -> None:
        """`shape` of the logits: S, depths, vocabulary."""
        s, depths, _ = shape
        i32, f32, each, tree = torch.int32, torch.float32, (s,), (s, num_nodes)
        self.kernels = kernels
        self.settings = PinnedStaging(
            {
                "seeds": (each, torch.int64),
                "temperature": (each, f32),
                "base_lengths": (each, i32),
                "roots": (each, i32),
                "budgets": (each, i32),
                "widths": (each, i32),
                "spines": (each, i32),
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
        self._given = TreeSettings(**self.settings.device)
        self._nodes = TreeNodes(**self.trees.device)
        ids, scores, log_probs = (
            torch.zeros(s, depths, width, dtype=dtype, device=device) for dtype in (i32, f32, f32)
        )
        self._candidates = Candidates(ids, scores, log_probs)

    def write(self, wanted: Sequence[tuple[int, int, TreeOptions, SamplingParams]]) -> None:
        """The host's part: root, base length, options and sampling settings of each sequence."""
        host = self.settings.host
        self.settings.on_host.zero_()
        for i, (root, base_length, options, sampling) in enumerate(wanted):
            host["roots"][i], host["base_lengths"][i] = root, base_length
            host["budgets"][i], host["widths"][i] = options.tree_budget, width_of(options)
            host["spines"][i] = options.spine and options.algorithm == "ddtree"
            if not sampling.is_greedy:
                host["temperature"][i] = sampling.temperature
                host["seeds"][i] = np.uint64(sampling.seed).astype(np.int64)

    def run(self, logits: Tensor) -> None:
        """The device's part: from logits [S, depths, V] to the host's copy of the trees."""
        self.settings.send()
        self.kernels.likeliest(logits, self._given, self._candidates)
        self.kernels.best_first(self._given, self._candidates, self._nodes)
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
