"""The accept walk on the device: verify_service.core.accept for a batch, from the tokens drawn at every node.

One program per sequence follows its path. A walk that is cut by a stop token or by length commits nothing, and its
tokens are what the answer still gets. So does one that comes to a node without a draw, which ends the request.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verify_service.core.accept import Finish
from verify_service.kernels.arguments import FINISHES, NO_DRAW, DrawSettings, Outcome, TreeMetadata

_STOP = tl.constexpr(FINISHES.index(Finish.STOP))
_LENGTH = tl.constexpr(FINISHES.index(Finish.LENGTH))
_NO_DRAW = tl.constexpr(NO_DRAW)


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
        code = tl.where(token < 0, _NO_DRAW, tl.where(is_stop, _STOP, tl.where(count >= left, _LENGTH, 0)))
        child = tl.max(tl.where((parent == node) & (carried == token), i, -1), 0)
        node = tl.where(code > 0, -1, child)
    tl.store(path_length + b, tl.where(code > 0, 0, count))
    tl.store(finish + b, code)


def accept_walk(input_ids: Tensor, tree: TreeMetadata, drawn: Tensor, settings: DrawSettings, outcome: Outcome) -> None:
    b, n = input_ids.shape
    m, d = settings.stop_ids.shape[1], outcome.path.shape[1]
    _accept_walk_kernel[(b,)](
        input_ids, tree.parents, tree.num_nodes, drawn, settings.stop_ids, settings.remaining,
        outcome.path, outcome.path_length, outcome.tokens, outcome.finish, n, m, d,
        triton.next_power_of_2(n), triton.next_power_of_2(m), triton.next_power_of_2(d), num_warps=1,
    )  # fmt: skip
