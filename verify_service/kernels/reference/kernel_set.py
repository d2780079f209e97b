"""The kernels in plain PyTorch, on any device: what the step computes, written for clarity."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.noise import NoiseCache
from draftwood.sampling import SamplingParams, draw
from draftwood.tree import DraftTree
from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.core.accept import accept
from verify_service.core.target_spec import GDN, MAMBA2, RecurrentShape
from verify_service.kernels.arguments import FINISHES, NO_DRAW, NODES_PER_WORD, Draws, Outcome, TreeMetadata
from verify_service.kernels.kernel_set import KernelSet
from verify_service.kernels.reference.add_norm import add_norm, swiglu
from verify_service.kernels.reference.ancestors import ancestor_bias_of, ancestor_mask_of
from verify_service.kernels.reference.gdn_commit import gdn_commit_one
from verify_service.kernels.reference.gdn_verify import gdn_verify as gdn_over_tree
from verify_service.kernels.reference.mamba2_commit import mamba2_commit_one
from verify_service.kernels.reference.mamba2_verify import mamba2_verify as mamba2_over_tree
from verify_service.kernels.reference.rotate_heads import rotate_heads
from verify_service.kernels.reference.tree_attention import tree_attention as attention_over_tree
from verify_service.kernels.reference.tree_conv import commit_window, tree_conv


def tree_metadata(s: TreeMetadata) -> None:
    b = s.parents.shape[0]
    for row in range(b):
        paths: list[list[int]] = []
        for i, parent in enumerate(s.parents[row].tolist()):
            paths.append([*(paths[parent] if parent >= 0 else []), i])
            words = [0] * s.ancestors.shape[2]
            for j in paths[i]:
                words[j // NODES_PER_WORD] |= 1 << (j % NODES_PER_WORD)
            s.ancestors[row, i] = torch.from_numpy(np.array(words, np.uint64).view(np.int64))
            s.depths[row, i] = len(paths[i]) - 1
        for block in range(s.block_depth.shape[1]):
            first = block * NODES_PER_WORD
            inside = paths[first : first + NODES_PER_WORD]
            s.block_depth[row, block] = max(sum(j >= first for j in path) - 1 for path in inside)
        s.tree_depth[row] = s.depths[row].max()
    s.positions.copy_(s.base_lengths[:, None] + s.depths)


def conv_index(parents: Tensor, kernel_size: int) -> Tensor:
    """Rows of (window ++ nodes) that a node's convolution reads, oldest first: int64 [B, N, kernel_size]."""
    at = torch.arange(parents.shape[1], device=parents.device).expand(parents.shape)
    rows: list[Tensor] = []
    for _ in range(kernel_size):
        rows.append(kernel_size - 1 + at)
        at = torch.where(at >= 0, parents.long().gather(1, at.clamp(min=0)), at - 1)
    return torch.stack(rows[::-1], -1)


def conv_gate(
    projected: Tensor,  # [B, N, q | k | v | z | b | a]
    parents: Tensor,
    windows: Tensor,  # [T, kernel_size - 1, C]
    state_slots: Tensor,
    weight: Tensor,  # [kernel_size, C] float32
    decay: Tensor,  # [HV] float32
    dt_bias: Tensor,  # [HV] float32
    inputs: Tensor,  # [B, N, C], written, as all below
    conv: Tensor,
    norms: Tensor,
    g: Tensor,
    beta: Tensor,
    key_dim: int,
) -> None:
    channels, hv, keys = inputs.shape[-1], g.shape[-1], norms.shape[-1] * key_dim
    raw = projected[..., :channels].contiguous()
    b, a = projected[..., -2 * hv :].split([hv, hv], -1)
    out = tree_conv(raw, windows[state_slots.long()], conv_index(parents, weight.shape[0]), weight)
    heads = out[..., :keys].unflatten(-1, (-1, key_dim))
    inputs.copy_(raw)
    conv.copy_(out)
    norms.copy_(torch.rsqrt((heads * heads).sum(-1) + 1e-6))
    g.copy_(decay * F.softplus(a.float() + dt_bias))
    beta.copy_(b.sigmoid().float())


def _split(conv: Tensor, norms: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, normalised, and v of GDN, float32 with heads apart."""
    hv, dv, dk = states.shape[-3:]
    keys = norms.shape[-1] * dk
    qk = conv[..., :keys].float().unflatten(-1, (-1, dk)) * norms[..., None]
    q, k = qk.chunk(2, -2)
    return q, k, conv[..., keys:].float().unflatten(-1, (hv, dv))


def gdn_verify(
    conv: Tensor,
    norms: Tensor,
    g: Tensor,
    beta: Tensor,
    s: TreeMetadata,
    states: Tensor,
    out: Tensor,  # [B, N, HV, V], written
    norm: tuple[Tensor, Tensor, float],  # z [B, N, HV V], w [V], eps: out is w * rmsnorm(o) * silu(z) per head
) -> None:
    ancestor_mask = ancestor_mask_of(s.ancestors)
    state = states[s.state_slots.long()]
    o = gdn_over_tree(*_split(conv, norms, states), g, beta, state, ancestor_mask, ancestor_bias_of(ancestor_mask))
    z, weight, eps = norm
    normed = F.rms_norm(o.to(out.dtype).float(), (o.shape[-1],), None, eps).to(out.dtype)
    out.copy_((weight * normed) * F.silu(z.float()).view_as(o))


def mamba2_conv_gate(
    xbc: Tensor,  # [B, N, C]
    dt: Tensor,  # [B, N, HV]
    parents: Tensor,
    windows: Tensor,
    state_slots: Tensor,
    weight: Tensor,  # [kernel_size, C] float32
    bias: Tensor | None,  # [C] float32
    decay: Tensor,  # [HV] float32
    dt_bias: Tensor,  # [HV]
    limits: tuple[float, float],
    inputs: Tensor,
    conv: Tensor,
    g: Tensor,
    beta: Tensor,
) -> None:
    raw = xbc.contiguous()
    out = tree_conv(raw, windows[state_slots.long()], conv_index(parents, weight.shape[0]), weight, bias)
    inputs.copy_(raw)
    conv.copy_(out)
    step = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(*limits).float()
    beta.copy_(step)
    g.copy_(decay * step)


def _split_mamba2(conv: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """C, B and x of Mamba2, float32 with heads apart."""
    hv, dv, dk = states.shape[-3:]
    x, keys, queries = conv.float().tensor_split((hv * dv, (conv.shape[-1] + hv * dv) // 2), -1)
    return queries.unflatten(-1, (-1, dk)), keys.unflatten(-1, (-1, dk)), x.unflatten(-1, (hv, dv))


def mamba2_verify(
    conv: Tensor, g: Tensor, beta: Tensor, s: TreeMetadata, states: Tensor, skip: Tensor, out: Tensor
) -> None:
    ancestor_mask = ancestor_mask_of(s.ancestors)
    queries, keys, x = _split_mamba2(conv, states)
    state = states[s.state_slots.long()]
    y = mamba2_over_tree(queries, keys, x, g, beta, state, ancestor_mask, ancestor_bias_of(ancestor_mask))
    out.copy_(y + skip[:, None] * x)


def tree_attention(
    q: Tensor,  # [B, N, HQ, D]
    k: Tensor,  # [B, N, HKV, D]
    v: Tensor,  # [B, N, HKV, D]
    key_pool: Tensor,  # [HKV, S, D]
    value_pool: Tensor,
    s: TreeMetadata,
    page_size: int,
    scaling: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    out: Tensor,  # [B, N, HQ, D]
) -> None:
    length = max(int(s.base_lengths.max()), 1)
    at = torch.arange(length, device=q.device)
    slots = s.page_table[:, at // page_size].long() * page_size + at % page_size
    bias = torch.zeros(slots.shape, device=q.device)
    bias.masked_fill_(at >= s.base_lengths[:, None], -torch.inf)
    queries, keys, values = (t.transpose(1, 2) for t in (q, k, v))
    ancestor_bias = ancestor_bias_of(ancestor_mask_of(s.ancestors))
    arguments = (
        key_pool,
        value_pool,
        slots,
        bias,
        ancestor_bias,
        s.positions,
        scaling,
        sliding_window,
        soft_cap,
        sinks,
    )
    out.copy_(attention_over_tree(queries, keys, values, *arguments))


def recurrent_commit(
    shape: RecurrentShape, commit_inputs: CommitInputs, outcome: Outcome, pools: Pools, s: TreeMetadata
) -> None:
    for row, length in enumerate(outcome.path_length.tolist()):
        if not length:
            continue
        path, slot = outcome.path[row, :length].long(), int(s.state_slots[row])
        conv, g, beta = (
            t[:, row].index_select(1, path) for t in (commit_inputs.conv, commit_inputs.g, commit_inputs.beta)
        )
        if shape.kind == GDN:
            norms = commit_inputs.norms[:, row].index_select(1, path)
            _, k, v = _split(conv, norms, pools.states)
            _replay(gdn_commit_one, pools.states[:, slot], k, v, g, beta)
        elif shape.kind == MAMBA2:
            _, keys, x = _split_mamba2(conv, pools.states)
            _replay(mamba2_commit_one, pools.states[:, slot], keys, x, g, beta)
        commit_window(pools.windows[:, slot], commit_inputs.inputs[:, row].index_select(1, path))


def _replay(one: object, state: Tensor, *tokens: Tensor) -> None:
    assert callable(one)
    for i in range(tokens[0].shape[1]):
        one(state, *(t[:, i].contiguous() for t in tokens))


def kv_commit(commit_inputs: CommitInputs, outcome: Outcome, pools: Pools, s: TreeMetadata, page_size: int) -> None:
    for row, length in enumerate(outcome.path_length.tolist()):
        path = outcome.path[row, :length].long()
        at = int(s.base_lengths[row]) + torch.arange(length, device=path.device)
        slots = s.page_table[row, at // page_size].long() * page_size + at % page_size
        for pool, nodes in ((pools.keys, commit_inputs.keys), (pools.values, commit_inputs.values)):
            pool.index_copy_(2, slots, nodes[:, row].index_select(1, path).transpose(1, 2))


def sample(logits: Tensor, s: TreeMetadata, d: Draws, drawn: Tensor, has_filters: bool) -> None:
    """[B, N, V] logits to the token drawn at each node."""
    del has_filters
    noise = NoiseCache(logits.shape[-1])
    for row in range(logits.shape[0]):
        params = SamplingParams(
            temperature=float(d.temperature[row]),
            top_k=int(d.top_k[row]),
            top_p=float(d.top_p[row]),
            min_p=float(d.min_p[row]),
            seed=int(d.seeds[row]) & (2**64 - 1),
        )
        for node in range(logits.shape[1]):
            values = logits[row, node].float().cpu().numpy()
            is_sound = np.isfinite(values.max())
            drawn[row, node] = draw(values, params, int(s.positions[row, node]) + 1, noise) if is_sound else -1


def accept_walk(input_ids: Tensor, s: TreeMetadata, drawn: Tensor, d: Draws, outcome: Outcome) -> None:
    limit = outcome.path.shape[1]
    for t in (outcome.path, outcome.tokens):
        t.fill_(-1)
    outcome.path_length.zero_()
    outcome.finish.zero_()
    for row, n in enumerate(s.num_nodes.tolist()):
        if not n:
            continue
        ids, parents, tokens = (t[row, :n].tolist() for t in (input_ids, s.parents, drawn))
        tree = DraftTree.from_nodes(ids[0], ids[1:], parents[1:], [0.0] * (n - 1))
        stops = set(d.stop_ids[row].tolist())  # with -1: no draw
        walk = accept(tree, tokens.__getitem__, stop_token_ids=stops, max_tokens=int(d.remaining[row]))
        count = min(len(walk.path), limit)  # a longer walk goes on in the next step
        finish = FINISHES.index(walk.finish) if count == len(walk.path) else 0
        finish = NO_DRAW if walk.tokens[count - 1] < 0 else finish
        outcome.path[row, :count] = torch.tensor(walk.path[:count], dtype=torch.int32)
        outcome.tokens[row, :count] = torch.tensor(walk.tokens[:count], dtype=torch.int32)
        outcome.path_length[row] = 0 if finish else count
        outcome.finish[row] = finish


PLAIN = KernelSet(
    is_capturable=False,
    tree_metadata=tree_metadata,
    conv_gate=conv_gate,
    gdn_verify=gdn_verify,
    mamba2_conv_gate=mamba2_conv_gate,
    mamba2_verify=mamba2_verify,
    add_norm=add_norm,
    swiglu=swiglu,
    rotate_heads=rotate_heads,
    tree_attention=tree_attention,
    recurrent_commit=recurrent_commit,
    kv_commit=kv_commit,
    sample=sample,
    accept_walk=accept_walk,
)
