"""Tree attention beside its floors and its rivals on the same tensors, one layer of Qwen3.6-27B's 24/4 heads x 256.

    python -m benchmarks.kernels.attention --output benchmarks/results/h200/attention.json

Floors: the prefix's keys and values read once at the bandwidth of a copy, and the products at the rate of a large
matrix product, both measured in the same run. Rivals get keys and values side by side, without pages, and masks that
were made before: scaled_dot_product_attention with a dense mask, whose rows are packed by KV head as ours are, and
FlexAttention, compiled.
"""

from __future__ import annotations

import argparse
import random
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.timing import RESULTS, copies, copy_bandwidth, graph_seconds, sweep, write
from benchmarks.kernels.trees import metadata_of, random_parents, underived_metadata
from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.kernels.arguments import AttentionSettings, KvPages, Outcome
from verify_service.kernels.reference import tree_attention as reference
from verify_service.kernels.triton.commit import kv_commit
from verify_service.kernels.triton.tree_attention import tree_attention
from verify_service.kernels.triton.tree_metadata import tree_metadata

HQ, HKV, D, PAGE = 24, 4, 256, 64
LAYERS, LONGEST_PATH = 16, 16
SETTINGS, CUDA = AttentionSettings(D**-0.5), torch.device("cuda")
PREFIXES = (1024, 8192, 32768)
NODES = (1, 16, 32, 64, 128)
BARS = {1024: 22.0, 8192: 60.0, 32768: 160.0}  # microseconds at 64 nodes, batch 1
RIVAL_NODES = 64
MOST_KEYS = 1 << 19  # of all rows and layers; more would not fit beside the rivals


def drawn(*size: int) -> Tensor:
    """Random bfloat16 numbers."""
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")


class Case:
    """Layers with tensors of their own, together larger than the L2 cache, over one set of trees."""

    def __init__(self, b: int, n: int, prefix: int) -> None:
        self.b, self.n, self.prefix = b, n, prefix
        bytes_a_layer = 2 * b * prefix * HKV * D * 2
        self.layers = max(1, min(copies(bytes_a_layer), MOST_KEYS // (b * prefix)))
        pages = prefix // PAGE + -(-n // PAGE)
        table = (torch.randperm(b * pages, device="cuda") + 1).view(b, pages).int()
        self.key_pool = drawn(self.layers, HKV, (b * pages + 1) * PAGE, D)
        self.value_pool = drawn(*self.key_pool.shape)
        self.q, self.k, self.v = (drawn(self.layers, b, n, heads, D) for heads in (HQ, HKV, HKV))
        self.out = torch.full_like(self.q, torch.nan)
        rng = random.Random(n)
        trees = [random_parents(rng, n, LONGEST_PATH - 1) for _ in range(b)]
        bases = [prefix - 5] * b  # the last page is partial
        self.tree = metadata_of(trees, n, CUDA, base_lengths=bases, page_table=table)

    def derive(self) -> None:
        tree_metadata(self.tree)

    def attend(self, layer: int) -> None:
        pages = KvPages(self.key_pool[layer], self.value_pool[layer], PAGE)
        tree_attention(self.q[layer], self.k[layer], self.v[layer], pages, self.tree, SETTINGS, self.out[layer])

    def error(self) -> float:
        """Relative Frobenius distance from the plain twin in float32."""
        plain = torch.full_like(self.q[0], torch.nan, dtype=torch.float32)
        pages = KvPages(self.key_pool[0].float(), self.value_pool[0].float(), PAGE)
        rows = (self.q[0].float(), self.k[0].float(), self.v[0].float())
        reference.tree_attention(*rows, pages, self.tree, SETTINGS, plain)
        self.attend(0)
        return float((self.out[0] - plain).norm() / plain.norm())

    def microseconds(self) -> float:
        return sweep([partial(self.attend, i) for i in range(self.layers)]) * 1e6

    def mask(self) -> Tensor:
        """[B, N, keys] bool over prefix and nodes, without the page's rest."""
        nodes = torch.arange(self.n, device="cuda")
        seen = (self.tree.ancestors[:, :, nodes // 64] >> (nodes % 64)) & 1 > 0
        return torch.cat([seen.new_ones(self.b, self.n, self.prefix), seen], 2)

    def dense(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values of each layer as the rivals take them: heads first, no pages."""
        pages = self.tree.page_table.long()[:, : self.prefix // PAGE, None]
        slots = (pages * PAGE + torch.arange(PAGE, device="cuda")).flatten(1)
        layers: list[tuple[Tensor, Tensor, Tensor]] = []
        for i in range(self.layers):
            pools = ((self.key_pool[i], self.k[i]), (self.value_pool[i], self.v[i]))
            k, v = (torch.cat([p[:, slots].transpose(0, 1), rows.transpose(1, 2)], 2).contiguous() for p, rows in pools)
            layers.append((self.q[i].transpose(1, 2).contiguous(), k, v))
        return layers


def rivals(case: Case) -> dict[str, float | str]:
    """Microseconds per layer; what went wrong, for one that does not run."""
    times: dict[str, float | str] = {}
    layers, mask = case.dense(), case.mask()
    group = HQ // HKV
    rows = mask[:, None].repeat_interleave(group, 2).contiguous()  # (node, query head in group), as our rows are
    packed = [(c[0].unflatten(1, (HKV, group)).transpose(2, 3).flatten(2, 3).contiguous(), *c[1:]) for c in layers]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=rows)

    def visible(b: Tensor, _: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return mask[b, row, key]

    blocks = create_block_mask(visible, case.b, None, case.n, mask.shape[2], device="cuda")
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, block_mask=blocks, enable_gqa=True)

    for name, call, inputs in (("sdpa", sdpa, packed), ("flex", flex, layers)):
        try:
            times[f"{name}_us"] = sweep([partial(call, *c) for c in inputs]) * 1e6
        except Exception as error:  # a rival that cannot take the shape is a result, too
            times[f"{name}_us"] = f"{type(error).__name__}: {str(error)[:200]}"
    return times


def matrix_rate() -> float:
    """Operations per second of a large bfloat16 product."""
    a, b = drawn(8192, 8192), drawn(8192, 8192)
    return 2 * 8192**3 / graph_seconds(lambda: a @ b, repeats=10)


def commit_microseconds(b: int) -> float:
    """KV commit of all layers, path of 7."""
    nothing = torch.empty(0, device="cuda")
    rows, pools = (
        [drawn(*shape) for _ in range(2)] for shape in ((LAYERS, b, 64, HKV, D), (LAYERS, HKV, (b + 1) * 1024, D))
    )
    commit_inputs, into = CommitInputs(*rows, *[nothing] * 5), Pools(*pools, *[nothing] * 3)
    path = torch.arange(LONGEST_PATH, dtype=torch.int32, device="cuda").repeat(b, 1)
    outcome = Outcome(path, torch.full((b,), 7, dtype=torch.int32, device="cuda"), nothing, nothing)
    table = torch.arange(16 * b, dtype=torch.int32, device="cuda").view(b, 16) + 16
    tree = underived_metadata([[-1]] * b, 1, CUDA, base_lengths=[1000] * b, page_table=table)
    return graph_seconds(partial(kv_commit, commit_inputs, outcome, into, tree, PAGE)) * 1e6


def measure(batches: tuple[int, ...], output: Path) -> None:
    """Our own figures, then those of rivals; what is there is written as it comes."""
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    result: dict[str, Any] = {"copy_bytes_per_second": bandwidth, "operations_per_second": rate}
    result["tree_metadata_us"] = {n: graph_seconds(Case(1, n, 64).derive) * 1e6 for n in (64, 256)}
    result["kv_commit_us"] = {b: commit_microseconds(b) for b in (1, 8)}
    rows: dict[tuple[int, int, int], dict[str, Any]] = {}
    for b, prefix, n in product(batches, PREFIXES, NODES):
        case = Case(b, n, prefix)
        row: dict[str, Any] = {"batch": b, "prefix": prefix, "nodes": n, "error": case.error()}
        row["us"] = case.microseconds()
        row["floor_bytes_us"] = b * (prefix + n) * HKV * D * 4 / bandwidth * 1e6
        row["floor_operations_us"] = b * 4 * n * HQ * D * (prefix + n) / rate * 1e6
        rows[b, prefix, n] = row
        print(row, flush=True)
        del case
        torch.cuda.empty_cache()
    write(output, {**result, "attention": list(rows.values())})
    for prefix in PREFIXES if 1 in batches else ():
        row = rows[1, prefix, RIVAL_NODES]
        row |= {"bar_us": BARS[prefix], **rivals(Case(1, RIVAL_NODES, prefix))}
        print(row, flush=True)
        write(output, {**result, "attention": list(rows.values())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "h200" / "attention.json")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("measures on a GPU, and torch finds none here")
    measure(tuple(arguments.batches), arguments.output)


if __name__ == "__main__":
    main()
