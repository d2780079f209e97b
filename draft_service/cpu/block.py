"""The inputs of one pass over the draft blocks of a batch: rotations, keys and values, masks.

One sequence is read where it lies. Several are copied side by side, right-aligned, into a workspace that is allocated
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_service.cache.context_cache import CachedSequence, ContextCache
from draft_service.model.config import DrafterConfig, LayerAttention


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """What DraftModel.forward takes besides the embedded blocks; letters as there."""

    cos: Tensor  # [S, N, 1, D]
    sin: Tensor  # [S, N, 1, D]
    keys: Tensor  # [L, S, G, T, D]
    values: Tensor  # [L, S, G, T, D]
    masks: tuple[Tensor | None, ...]  # L times [S, 1, Q * N, T]


class BlockAssembler:
    """Builds the inputs from the context cache."""

    def __init__(
        self, config: DrafterConfig, cache: ContextCache, rotation: tuple[Tensor, Tensor], max_batch: int
    ) -> None:
        self.config, self.cache, self.cos, self.sin = config, cache, *rotation
        # Last in the layout are rows, so that shorter batches use a part of each head's rows.
        self._workspace: tuple[Tensor, Tensor] | None = None
        self._max_batch = max_batch

    def assemble(self, sequences: Sequence[CachedSequence]) -> BlockInputs:
        """Inputs for one block behind the context of every sequence."""
        n = self.config.block_size
        lengths = [s.num_rows for s in sequences]
        positions = torch.tensor([s.length for s in sequences])[:, None] + torch.arange(n)  # [S, N]
        keys, values = self._in_place(sequences[0]) if len(sequences) == 1 else self._side_by_side(sequences)
        num_keys = max(lengths) + n
        made: dict[LayerAttention, Tensor | None] = {}
        for layer in self.config.layers:
            if layer not in made:
                made[layer] = self._mask(layer, lengths, num_keys)
        device = self.cos.device
        at = positions.to(device)
        return BlockInputs(
            self.cos[at][:, :, None], self.sin[at][:, :, None], keys, values, tuple(made[x] for x in self.config.layers)
        )

    def _in_place(self, sequence: CachedSequence) -> tuple[Tensor, Tensor]:
        end, slot = sequence.num_rows + self.config.block_size, sequence.slot
        return self.cache.keys[:, slot : slot + 1, :, :end], self.cache.values[:, slot : slot + 1, :, :end]

    def _side_by_side(self, sequences: Sequence[CachedSequence]) -> tuple[Tensor, Tensor]:
        if self._workspace is None:
            layers, _, groups, rows, dim = self.cache.keys.shape
            empty = self.cache.keys.new_zeros(layers, self._max_batch, groups, rows, dim)
            self._workspace = empty, torch.zeros_like(empty)
        longest = max(s.num_rows for s in sequences)
        for cached, work in zip((self.cache.keys, self.cache.values), self._workspace, strict=True):
            for i, s in enumerate(sequences):
                work[:, i, :, longest - s.num_rows : longest] = cached[:, s.slot, :, : s.num_rows]
        end = longest + self.config.block_size
        keys, values = (work[:, : len(sequences), :, :end] for work in self._workspace)
        return keys, values

    def _mask(self, layer: LayerAttention, lengths: Sequence[int], num_keys: int) -> Tensor | None:
        """Visible keys [S, 1, Q * N, T] of one kind of layer; None where that is all of them."""
        is_padded = len(lengths) > 1  # if not now, then in another step: graphs differ by whether there is a mask
        if layer.window is None and not layer.is_causal and not is_padded:
            return None
        n, queries = self.config.block_size, self.config.num_heads // self.config.num_kv_heads
        behind = torch.arange(num_keys - n, num_keys)[:, None] - torch.arange(num_keys)  # [N, T] query - key
        visible = torch.ones(n, num_keys, dtype=torch.bool)
        if layer.window is not None:
            visible &= behind < layer.window
        if layer.is_causal:
            visible &= behind >= 0
        elif layer.window is not None:
            visible &= -behind < layer.window
        padding = torch.tensor([num_keys - n - length for length in lengths])  # [S]
        mask = visible & (torch.arange(num_keys) >= padding[:, None, None])  # [S, N, T]
        return mask.repeat(1, queries, 1)[:, None].to(self.cos.device)
