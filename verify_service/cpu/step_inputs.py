"""What one verify pass needs besides the weights: derived once a step from the trees' parents, never per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.tree import DraftTree
from verify_service.model.shapes import padded, rounded_up

PREFIX_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class StepInputs:
    """B sequences with N nodes each; shorter trees are padded with nodes that see only themselves."""

    input_ids: Tensor  # [B, N] int64
    positions: Tensor  # [B, N] int64
    prefix_slots: Tensor  # [B, L] int64
    prefix_bias: Tensor  # [B, L] float32
    ancestor_mask: Tensor  # [B, N, N] float32: 1 where j is i or its ancestor
    ancestor_bias: Tensor  # [B, N, N] float32: 0 where j is i or its ancestor, else -inf
    conv_index: Tensor  # [B, N, kernel_size] int64, rows of (committed window ++ nodes), oldest first
    state_slots: Tensor  # [B] int64


@dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence's part of a step."""

    tree: DraftTree
    base_length: int
    slots: NDArray[np.int64]  # [at least base_length] pool rows by position
    state_slot: int


def build_step_inputs(
    rows: Sequence[StepRow], *, kernel_size: int, scratch_slot: int, num_nodes: int | None = None
) -> StepInputs:
    """Builds the inputs of a pass; `num_nodes` pads N beyond the largest tree, and several lone roots are padded to two
    nodes: the graph of several trees serves them, too (docs/decisions/0007). N is `padded`."""
    b = len(rows)
    if b == 1 and rows[0].tree.num_nodes == 1 and (num_nodes or 1) == 1:
        return _lone_root(rows[0], kernel_size, scratch_slot)
    n = max(max(row.tree.num_nodes for row in rows), num_nodes or 0, 2 if b > 1 else 1)
    n = padded(n)
    length = rounded_up(max(1, *(row.base_length for row in rows)), PREFIX_MULTIPLE)
    input_ids = np.zeros((b, n), np.int64)
    positions = np.zeros((b, n), np.int64)
    prefix_slots = np.full((b, length), scratch_slot, np.int64)
    prefix_bias = np.full((b, length), -np.inf, np.float32)
    ancestor_mask = np.zeros((b, n, n), np.float32)
    conv_index = np.zeros((b, n, kernel_size), np.int64)
    for i, row in enumerate(rows):
        tree, base, m = row.tree, row.base_length, row.tree.num_nodes
        input_ids[i, :m] = tree.token_ids
        positions[i, :m] = tree.depths
        positions[i] += base
        prefix_slots[i, :base] = row.slots[:base]
        prefix_bias[i, :base] = 0.0
        fill_paths(tree.parents, ancestor_mask[i], conv_index[i])
    state_slots = np.array([row.state_slot for row in rows], np.int64)
    ancestors = torch.from_numpy(ancestor_mask)
    return StepInputs(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions),
        prefix_slots=torch.from_numpy(prefix_slots),
        prefix_bias=torch.from_numpy(prefix_bias),
        ancestor_mask=ancestors,
        ancestor_bias=torch.zeros(b, n, n).masked_fill_(ancestors == 0, -torch.inf),
        conv_index=torch.from_numpy(conv_index),
        state_slots=torch.from_numpy(state_slots),
    )


def _lone_root(row: StepRow, kernel_size: int, scratch_slot: int) -> StepInputs:
    """The same for a step without a draft, by few operations: where they are cold, each costs tens of microseconds."""
    base = row.base_length
    prefix_slots = np.full((1, rounded_up(max(1, base), PREFIX_MULTIPLE)), scratch_slot, np.int64)
    prefix_bias = np.full(prefix_slots.shape, -np.inf, np.float32)
    prefix_slots[0, :base], prefix_bias[0, :base] = row.slots[:base], 0.0
    ancestor_mask, ancestor_bias, conv_index = _lone_paths(kernel_size)
    return StepInputs(
        input_ids=torch.tensor([row.tree.token_ids]),
        positions=torch.tensor([[base]]),
        prefix_slots=torch.from_numpy(prefix_slots),
        prefix_bias=torch.from_numpy(prefix_bias),
        ancestor_mask=ancestor_mask,
        ancestor_bias=ancestor_bias,
        conv_index=conv_index,
        state_slots=torch.tensor([row.state_slot]),
    )


@cache
def _lone_paths(kernel_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """`ancestor_mask`, `ancestor_bias` and `conv_index` of a lone root."""
    return torch.ones(1, 1, 1), torch.zeros(1, 1, 1), torch.arange(kernel_size).view(1, 1, kernel_size)


def fill_paths(
    parents: Sequence[int],
    ancestor_mask: NDArray[np.float32],  # [N, N], zero on entry
    conv_index: NDArray[np.int64],  # [N, kernel_size]
) -> None:
    """Ancestor rows and convolution windows, a node from its parent's; nodes beyond the tree see only themselves."""
    n, kernel_size = conv_index.shape
    if tuple(parents) == tuple(range(-1, len(parents) - 1)):  # a chain: no loop
        ancestor_mask[:] = np.tri(n, dtype=np.float32)
        conv_index[:] = np.arange(n)[:, None] + np.arange(kernel_size)
        first_spare = len(parents)
        ancestor_mask[first_spare:] = 0.0
    else:
        first_spare = len(parents)
        windows: list[list[int]] = []
        for i, parent in enumerate(parents):
            if parent >= 0:
                ancestor_mask[i] = ancestor_mask[parent]
            ancestor_mask[i, i] = 1.0
            windows.append([*(windows[parent][1:] if parent >= 0 else range(kernel_size - 1)), kernel_size - 1 + i])
        conv_index[:first_spare] = windows
    spare = np.arange(first_spare, n)
    ancestor_mask[spare, spare] = 1.0
    conv_index[spare] = kernel_size - 1 + spare[:, None]
