"""The accept walk on the device: verify_service.core.accept for a batch, from the tokens drawn at every node.

One program a sequence follows its path, at most D_path nodes. A walk that is cut by a stop token or by length commits
nothing: its path length is 0, and its tokens are what the answer still gets. So does one that comes to a node without a
draw, which ends the request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.tree import DraftTree
from verify_service.core.accept import Finish, accept

FINISH_CODES = {None: 0, Finish.STOP: 1, Finish.LENGTH: 2}
NO_DRAW = 3  # among finish codes


@triton.jit
def _accept_walk_kernel(
    input_ids, parents, num_nodes, drawn, stop_ids, remaining, path, path_length, tokens, finish,
    N, M, D_PATH: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (B,). BN, BM and BD are N, M and D_PATH rounded up to powers of two."""
    b = tl.program_id(0)
    i, m, d = tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BD)
    tl.store(tokens + b * D_PATH + d, -1, mask=d < D_PATH)
    tl.store(path + b * D_PATH + d, 0, mask=d < D_PATH)
    tl.debug_barrier()
    nodes, left = tl.load(num_nodes + b), tl.load(remaining + b)
    is_child = (i > 0) & (i < nodes)
    parent = tl.load(parents + b * N + i, mask=is_child, other=-1)
    carried = tl.load(input_ids + b * N + i, mask=is_child, other=-1).to(tl.int32)
    stops = tl.load(stop_ids + b * M + m, mask=m < M, other=-1)
    node = tl.where(nodes > 0, 0, -1)
    count = tl.zeros([], tl.int32)
    code = tl.zeros([], tl.int32)
    while (node >= 0) & (count < D_PATH):
        token = tl.load(drawn + b * N + node)
        tl.store(path + b * D_PATH + count, node)
        tl.store(tokens + b * D_PATH + count, token)
        count += 1
        is_stop = tl.max((stops == token).to(tl.int32), 0) > 0
        code = tl.where(token < 0, 3, tl.where(is_stop, 1, tl.where(count >= left, 2, 0)))
        child = tl.max(tl.where((parent == node) & (carried == token), i, -1), 0)
        node = tl.where(code > 0, -1, child)
    tl.store(path_length + b, tl.where(code > 0, 0, count))
    tl.store(finish + b, code)


def accept_walk(
    input_ids: Tensor,  # [B, N] int64
    parents: Tensor,  # [B, N] int32
    num_nodes: Tensor,  # [B] int32; 0: the row is spare
    drawn: Tensor,  # [B, N] int32, the draw at each node, -1 for none
    stop_ids: Tensor,  # [B, M] int32, padded with -1
    remaining: Tensor,  # [B] int32, tokens that the answer may still have, at least 1
    outcome: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Writes `outcome`: path [B, D_path], path_length [B], tokens [B, D_path] padded with -1, finish [B], all int32.

    `tokens` holds the accepted tokens and last the bonus token; `finish` is 0 (none), 1 (stop), 2 (length) or 3 (a
    node without a draw). A path ends after D_path nodes even where the tree goes deeper.
    """
    path, path_length, tokens, finish = outcome
    b, n = input_ids.shape
    m, d = stop_ids.shape[1], path.shape[1]
    _accept_walk_kernel[(b,)](
        input_ids, parents, num_nodes, drawn, stop_ids, remaining, path, path_length, tokens, finish, n, m, d,
        triton.next_power_of_2(n), triton.next_power_of_2(m), triton.next_power_of_2(d), num_warps=1,
    )  # fmt: skip


def accept_walk_plain(
    input_ids: Tensor,  # [B, N] int64
    parents: Tensor,  # [B, N] int32
    num_nodes: Tensor,  # [B] int32
    drawn: Tensor,  # [B, N] int32
    stop_ids: Tensor,  # [B, M] int32
    remaining: Tensor,  # [B] int32
    outcome: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """The same by verify_service.core.accept."""
    path, path_length, tokens, finish = outcome
    path.zero_()
    path_length.zero_()
    tokens.fill_(-1)
    finish.zero_()
    for b, n in enumerate(num_nodes.tolist()):
        if n == 0:
            continue
        ids, above = input_ids[b, :n].tolist(), parents[b, :n].tolist()
        tree = DraftTree.from_nodes(ids[0], ids[1:], above[1:], [0.0] * (n - 1))
        draws: list[int] = drawn[b].tolist()
        stops = set(stop_ids[b].tolist()) - {-1}
        accepted = accept(tree, draws.__getitem__, stop_token_ids=stops | {-1}, max_tokens=int(remaining[b]))
        count = min(len(accepted.path), path.shape[1])
        is_cut = count < len(accepted.path)
        code = 0 if is_cut else NO_DRAW if accepted.tokens[-1] < 0 else FINISH_CODES[accepted.finish]
        path[b, :count] = torch.tensor(accepted.path[:count], dtype=torch.int32)
        tokens[b, :count] = torch.tensor(accepted.tokens[:count], dtype=torch.int32)
        path_length[b] = 0 if code else count
        finish[b] = code
