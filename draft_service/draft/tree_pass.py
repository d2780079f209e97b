"""One pass of the draft model over the blocks of a batch, and the trees of its logits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draft_service.cache.context_cache import CachedSequence, ContextCache
from draft_service.cpu.block import BlockAssembler
from draft_service.cpu.block_pass import BlockPass
from draft_service.draft.candidates import CandidateRanker, build_tree, likeliest
from draft_service.draft.types import Drafted
from draft_service.gpu.block_graphs import BlockGraphs
from draft_service.model.draft_model import DraftModel
from draftwood.sampling import SamplingParams
from draftwood.tree_options import TreeOptions


class TreeJob(NamedTuple):
    """A tree that is wanted below `root`, of a sequence whose context is cached."""

    sequence: CachedSequence
    root: int
    base_length: int
    options: TreeOptions
    sampling: SamplingParams


class Drafts(NamedTuple):
    """One result per job; times in seconds, of the pass and of the trees."""

    results: list[Drafted]
    draft_s: float
    tree_s: float


class TreePass:
    """With `graphs` passes run over static buffers, else over the cache as it lies."""

    def __init__(
        self,
        model: DraftModel,
        cache: ContextCache,
        rotation: tuple[Tensor, Tensor],  # cosines and sines [positions, D]
        graphs: BlockGraphs | None,
        *,
        max_batch: int,
        compile_steps: bool,
    ) -> None:
        config = model.config
        self._model, self._config, self._graphs = model, config, graphs
        self._blocks = BlockAssembler(config, cache, rotation, max_batch)
        self._pass = BlockPass(model, compile_steps=compile_steps)
        self._masks = torch.full((max_batch, config.block_size), config.mask_token_id)  # [max_batch, N]
        self._ranker = CandidateRanker(config.vocab_size, config.max_depth, model.device)

    def draft(self, jobs: Sequence[TreeJob]) -> Drafts:
        """Trees for at most `max_batch` jobs."""
        begin = time.perf_counter()
        results = self._draft_on_device(jobs)
        if results is not None:
            return Drafts(results, time.perf_counter() - begin, 0.0)
        depths = [self._depths(job.options) for job in jobs]
        logits = self.logits([job.root for job in jobs], [job.sequence for job in jobs], depths)
        middle = time.perf_counter()
        results = [self._tree(job, rows) for job, rows in zip(jobs, logits, strict=True)]
        return Drafts(results, middle - begin, time.perf_counter() - middle)

    def _draft_on_device(self, jobs: Sequence[TreeJob]) -> list[Drafted] | None:
        """Pass and trees without a look at the logits in between; None where a tree needs that."""
        graphs = self._graphs
        if graphs is None or not all(graphs.can_make(job.options, job.sampling) for job in jobs):
            return None
        wanted = [(job.root, job.base_length, job.options, job.sampling) for job in jobs]
        return [Drafted(tree) for tree in graphs.trees([job.sequence for job in jobs], wanted)]

    def _depths(self, options: TreeOptions) -> int:
        """Depths worth a product with the head: no tree is deeper than its budget."""
        deepest = self._config.max_depth
        return deepest if options.num_candidates else min(options.tree_budget, deepest)

    def logits(
        self, roots: Sequence[int], sequences: Sequence[CachedSequence], depths: Sequence[int]
    ) -> Sequence[Tensor]:  # float32 [depths, V] each
        """Of so many first depths of each sequence's block."""
        if self._graphs is not None:
            logits = self._graphs.logits(roots, sequences)
            return [logits[i, :n].float() for i, n in enumerate(depths)]
        inputs = self._blocks.assemble(sequences)
        block = self._masks[: len(roots)].clone()  # [S, N]
        block[:, 0] = torch.tensor(roots)
        hidden = self._pass(self._model.embed(block.to(self._model.device)), inputs)  # [S, N, H]
        first = 0 if self._config.sample_from_anchor else 1
        rows = torch.cat([hidden[i, first : first + n] for i, n in enumerate(depths)])
        return self._model.logits(rows).split(list(depths))

    def _tree(self, job: TreeJob, logits: Tensor) -> Drafted:  # logits [depths, V]
        options = job.options
        ranking = self._ranker.rank(logits[: options.tree_budget], options.width, job.sampling, job.base_length)
        candidates = likeliest(logits, options.num_candidates) if options.num_candidates else None
        return Drafted(build_tree(job.root, ranking, options), candidates)
