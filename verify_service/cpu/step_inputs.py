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
from verify_service.cache.pages import SCRATCH_SLOT

ROW_MULTIPLE, LARGE_ROW_MULTIPLE, PREFIX_MULTIPLE = 4, 16, 64


@dataclass(frozen=True, slots=True)
class StepInputs:
    """B sequences with N nodes each; shorter trees are padded with nodes that see only themselves."""

    input_ids: Tensor  # [B, N] int64
    positions: Tensor  # [B, N] int64
    ancestor_mask: Tensor  # [B, N, N] float32: 1 where j is i or its ancestor
    ancestor_bias: Tensor  # [B, N, N] float32: 0 where j is i or its ancestor, else -inf
    conv_index: Tensor  # [B, N, kernel_size] int64, rows of (committed window ++ nodes), oldest first
    prefix_slots: Tensor  # [B, L] int64
    prefix_bias: Tensor  # [B, L] float32
    state_slots: Tensor  # [B] int64


@dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence's part of a step."""

    tree: DraftTree
    base_length: int
    slots: NDArray[np.int64]  # [at least base_length] pool rows by position
    state_slot: int


def padded(num_rows: int) -> int:
    """The number of rows that so many are padded to: 1, 2, a multiple of 4, beyond 16 a multiple of 16. Each number
    costs code for its products (about 170 KB a product, made in 2 ms), each shape temporaries of sizes of its own: few
    of them keep memory in bounds (docs/decisions/0015)."""
    if num_rows <= 2:
        return num_rows
    return _rounded_up(num_rows, ROW_MULTIPLE if num_rows <= LARGE_ROW_MULTIPLE else LARGE_ROW_MULTIPLE)


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def build_step_inputs(rows: Sequence[StepRow], *, kernel_size: int, num_nodes: int = 1) -> StepInputs:
    """Builds the inputs of a pass; `num_nodes` pads N beyond the largest tree, and several lone roots are padded to two
    nodes: the graph of several trees serves them, too (docs/decisions/0007). N is `padded`."""
    b = len(rows)
    n = padded(max(*(row.tree.num_nodes for row in rows), num_nodes, 2 if b > 1 else 1))
    length = _rounded_up(max(1, *(row.base_length for row in rows)), PREFIX_MULTIPLE)
    prefix_slots = np.full((b, length), SCRATCH_SLOT, np.int64)
    prefix_bias = np.full((b, length), -np.inf, np.float32)
    for i, row in enumerate(rows):
        prefix_slots[i, : row.base_length] = row.slots[: row.base_length]
        prefix_bias[i, : row.base_length] = 0.0
    return StepInputs(
        *(_lone_root(rows[0], kernel_size) if n == 1 else _trees(rows, n, kernel_size)),
        prefix_slots=torch.from_numpy(prefix_slots),
        prefix_bias=torch.from_numpy(prefix_bias),
        state_slots=torch.tensor([row.state_slot for row in rows]),
    )


def _trees(rows: Sequence[StepRow], n: int, kernel_size: int) -> tuple[Tensor, ...]:
    """The fields of StepInputs that depend on the trees, in their order."""
    b = len(rows)
    input_ids, positions = np.zeros((b, n), np.int64), np.zeros((b, n), np.int64)
    ancestor_mask = np.zeros((b, n, n), np.float32)
    conv_index = np.zeros((b, n, kernel_size), np.int64)
    for i, row in enumerate(rows):
        tree, m = row.tree, row.tree.num_nodes
        input_ids[i, :m] = tree.token_ids
        positions[i, :m] = tree.depths
        positions[i] += row.base_length
        fill_paths(tree.parents, ancestor_mask[i], conv_index[i])
    ids, at, ancestors, index = (torch.from_numpy(t) for t in (input_ids, positions, ancestor_mask, conv_index))
    return ids, at, ancestors, torch.zeros(b, n, n).masked_fill_(ancestors == 0, -torch.inf), index


def _lone_root(row: StepRow, kernel_size: int) -> tuple[Tensor, ...]:
    """The same for a step without a draft, by few operations: where they are cold, each costs tens of microseconds."""
    return torch.tensor([row.tree.token_ids]), torch.tensor([[row.base_length]]), *_lone_paths(kernel_size)


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
    first_spare = len(parents)
    if tuple(parents) == tuple(range(-1, len(parents) - 1)):  # a chain: no loop
        ancestor_mask[:] = np.tri(n, dtype=np.float32)
        conv_index[:] = np.arange(n)[:, None] + np.arange(kernel_size)
        ancestor_mask[first_spare:] = 0.0
    else:
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
