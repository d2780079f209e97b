"""From a block's logits to trees: log-probs, the ranking under shared noise, chains and best-first trees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.noise import NoiseCache
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree, best_first
from draftwood.tree_options import TreeOptions


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of every depth."""

    token_ids: list[list[int]]  # [depths, width]
    log_probs: list[list[float]]  # [depths, width]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates in the order in which a tree takes them: by scores, which noise may have changed."""

    token_ids: list[list[int]]  # [depths, width]
    scores: list[list[float]]  # [depths, width], descending
    log_probs: list[list[float]]  # [depths, width], the drafter's own


def likeliest(logits: Tensor, width: int) -> Candidates:
    """The `width` likeliest tokens of each row of float32 logits [depths, V], over the full vocabulary."""
    top, ids = logits.topk(min(width, logits.shape[-1]), -1)
    return Candidates(ids.tolist(), (top - logits.logsumexp(-1, keepdim=True)).tolist())


class CandidateRanker:
    """Ranks the tokens of every depth of a block with the noise that the target will draw with."""

    def __init__(self, vocab_size: int, max_depth: int, device: torch.device) -> None:
        self._noise = NoiseCache(vocab_size)
        self._ranked = torch.empty(max_depth, vocab_size, device=device)
        self._gumbel = torch.empty(max_depth, vocab_size)  # filled here, then moved at once

    def rank(self, logits: Tensor, width: int, sampling: SamplingParams, base_length: int) -> Ranking:
        """Ranks rows of float32 logits [depths, V]; row i is for the token at position base_length + i + 1.

        score = log_softmax(log q + T Gumbel(seed, position)), the noise that the target's token will be drawn with.
        Biases of tokens count as in the target's draw.
        """
        if sampling.is_greedy and not sampling.logit_bias:
            best = likeliest(logits, width)
            return Ranking(best.token_ids, best.log_probs, best.log_probs)
        depths = logits.shape[0]
        ranked = self._ranked[:depths].copy_(logits)
        for token, bias in sampling.logit_bias.items():
            ranked[:, token] += bias
        if not sampling.is_greedy:
            gumbel = self._gumbel[:depths]
            for i, row in enumerate(gumbel.numpy()):
                row[:] = self._noise.row(sampling.seed, base_length + i + 1)
            ranked.add_(gumbel.to(ranked.device), alpha=sampling.temperature)
        top, ids = ranked.topk(min(width, ranked.shape[-1]), -1)
        scores = top - ranked.logsumexp(-1, keepdim=True)
        log_probs = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
        return Ranking(ids.tolist(), scores.tolist(), log_probs.tolist())


def build_tree(root: int, ranking: Ranking, options: TreeOptions) -> DraftTree:
    """The chain of first candidates, or the best-first tree."""
    if options.algorithm == "dflash":
        n = options.tree_budget
        first = [(ids[0], values[0]) for ids, values in zip(ranking.token_ids, ranking.log_probs, strict=True)][:n]
        return DraftTree.chain(root, [token for token, _ in first], [value for _, value in first])
    return best_first(
        root,
        ranking.token_ids,
        ranking.scores,
        options.tree_budget,
        log_probs=ranking.log_probs,
        spine=options.spine,
    )
