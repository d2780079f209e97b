"""The kernels that make trees, and what each promises: Triton's launchers on a GPU, their plain twins anywhere."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draft_service.kernels.arguments import Candidates, TreeNodes, TreeSettings


class KernelSet(Protocol):
    """The kernels of S sequences. A set keeps its scratch memory, as captured graphs hold on to it.

    Triton's launchers raise UnsupportedModelError for sizes beyond their limits.
    """

    def likeliest(self, logits: Tensor, settings: TreeSettings, candidates: Candidates) -> None:
        """The likeliest tokens of every depth, with log-probabilities over the whole vocabulary; writes `candidates`.

        logits [S, depths, vocab_size], biases added. Scores are log_softmax(log q + T Gumbel(seed, position)). Ties go
        to the lower id.
        """
        ...

    def best_first(self, settings: TreeSettings, candidates: Candidates, trees: TreeNodes) -> None:
        """The trees that draftwood.tree.best_first makes of the first `widths` candidates; writes `trees`.

        A width of 1 gives the chain.
        """
        ...
