"""The pass over draft blocks on a GPU: one graph per bucket of sequences and context rows, over static buffers.

The host writes four numbers per sequence; positions, masks and the copy of the context side by side are the graph's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from draft_service.cache.context_cache import CachedSequence, ContextCache
from draft_service.gpu.context_graphs import ContextGraphs
from draft_service.gpu.device_trees import NODES, WIDTHS, DeviceTrees, is_for_device, width_of
from draft_service.kernels.kernel_set import KernelSet
from draft_service.model.config import DrafterConfig, LayerAttention
from draft_service.model.draft_model import DraftModel
from draftwood.device.compilation import compiled
from draftwood.device.graphs import Graphs, bucket
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from draftwood.tree_options import TreeOptions

LEAST_ROWS = 256


def row_bucket(count: int) -> int:
    """Context rows of a program that has room for `count`: a power of two, or one and a half of the one below."""
    size = max(LEAST_ROWS, bucket(count))
    return size // 4 * 3 if count <= size // 4 * 3 and size > LEAST_ROWS else size


class BlockProgram:
    """The pass of one bucket: S sequences with at most T context rows each."""

    def __init__(
        self,
        model: DraftModel,
        cache: ContextCache,
        rotation: tuple[Tensor, Tensor],
        forward: Callable[..., Tensor],
        graphs: Graphs,
        shape: tuple[int, int],
        logits: Tensor,  # [S, max depth, V], written
    ) -> None:
        self.model, self.cache, self.forward = model, cache, forward
        self.cos, self.sin = rotation
        config, (s, t), device = model.config, shape, model.device
        n, layers, groups = config.block_size, len(config.layers), config.num_kv_heads
        # Roots, slots, context rows, positions of the roots.
        self.host = torch.zeros(4, s, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.inputs = torch.zeros(4, s, dtype=torch.int64, device=device)
        self._block = torch.full((s, n), config.mask_token_id, device=device)
        self._keys, self._values = (
            torch.zeros(layers, s, groups, t + n, config.head_dim, dtype=model.dtype, device=device) for _ in range(2)
        )
        self.logits = logits
        self._num_rows = t
        self.run = graphs.captured(self._run)

    def _run(self) -> None:
        model, config, t = self.model, self.model.config, self._num_rows
        self.inputs.copy_(self.host, non_blocking=True)
        roots, slots, num_rows, lengths = self.inputs.unbind(0)
        self._block[:, 0] = roots
        shape, (_, s, g, _, d) = self.cache.keys.shape, self._keys.shape
        # Rows of [layers * slots * G, rows * D]: whole pieces of memory are copied faster than a strided view's.
        heads = torch.arange(shape[0] * g, device=model.device).view(-1, 1, g)
        pieces = (heads // g * shape[1] + slots[:, None]) * g + heads % g
        for cached, work in ((self.cache.keys, self._keys), (self.cache.values, self._values)):
            rows = cached.view(-1, shape[3] * d)[:, : t * d].index_select(0, pieces.view(-1))
            work[:, :, :, :t] = rows.view(-1, s, g, t, d)
        at = lengths[:, None] + torch.arange(config.block_size, device=model.device)
        made = {layer: visible(config, layer, num_rows, t) for layer in dict.fromkeys(config.layers)}
        masks = tuple(made[layer] for layer in config.layers)
        x, cos, sin = model.embed(self._block), self.cos[at][:, :, None], self.sin[at][:, :, None]
        _mark(x, cos, sin, self._keys, self._values, masks)
        hidden = self.forward(x, cos, sin, self._keys, self._values, masks)
        first = 0 if config.sample_from_anchor else 1
        rows = hidden[:, first : first + config.max_depth]
        if self.logits.dtype == torch.float32:
            self.logits.copy_(model.logits(rows))
        else:
            out = self.logits.view(-1, config.vocab_size)
            torch.mm(rows.reshape(out.shape[0], -1), model.head.weight.t(), out=out)


def visible(config: DrafterConfig, layer: LayerAttention, num_rows: Tensor, t: int) -> Tensor:
    """Keys that a layer's queries see, bool [S, 1, Q * N, T + N]: context rows from the left, then the block."""
    n, queries, device = config.block_size, config.num_heads // config.num_kv_heads, num_rows.device
    node, row = torch.arange(n, device=device), torch.arange(t, device=device)
    behind = num_rows[:, None, None] + node[:, None] - row  # [S, N, T]
    context = (row < num_rows[:, None, None]).expand_as(behind)
    between = node[:, None] - node  # [N, N]
    block = torch.ones_like(between, dtype=torch.bool)
    if layer.window is not None:
        context = context & (behind < layer.window)
        block = block & (between < layer.window)
    if layer.is_causal:
        block = block & (between >= 0)
    elif layer.window is not None:
        block = block & (-between < layer.window)
    mask = torch.cat([context, block.expand(num_rows.shape[0], n, n)], -1)
    return mask.repeat(1, queries, 1)[:, None]


def _mark(x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, masks: Sequence[Tensor]) -> None:
    """Tells the compiler that sequences and context rows vary; a graph of its own serves one sequence."""
    mark = torch._dynamo.maybe_mark_dynamic  # pyright: ignore[reportPrivateUsage]
    for tensor in (keys, values, *masks):
        mark(tensor, 3)
    if x.shape[0] > 1:
        for tensor, dim in ((x, 0), (cos, 0), (sin, 0), (keys, 1), (values, 1), *((mask, 0) for mask in masks)):
            mark(tensor, dim)


class BlockGraphs:
    """Programs by bucket, made when they are first needed."""

    def __init__(
        self,
        model: DraftModel,
        cache: ContextCache,
        rotation: tuple[Tensor, Tensor],
        *,
        compile_steps: bool,
        kernels: KernelSet | None,
    ) -> None:
        """`kernels` make trees on the device; without, on the host."""
        self.model, self.cache, self.rotation, self.kernels = model, cache, rotation, kernels
        self.graphs = Graphs(model.device, enabled=True)
        is_cpu = model.device.type == "cpu"
        self._forward = compiled(model.forward, enabled=compile_steps, cpp_wrapper=is_cpu)
        self.contexts = ContextGraphs(model, cache, rotation, self.graphs)
        self._logits: dict[int, Tensor] = {}
        self._programs: dict[tuple[int, int], BlockProgram] = {}
        self._trees: dict[tuple[int, int, int], tuple[DeviceTrees, Callable[[], None]]] = {}
        for rows in (cache.keys, cache.values):  # what no mask shows is read all the same, and must be a number
            rows.zero_()

    def logits(self, roots: Sequence[int], sequences: Sequence[CachedSequence]) -> Tensor:
        """[S, max depth, V], valid until the next pass; rows past the sequences are of no use."""
        longest = max(s.num_rows for s in sequences)
        shape = bucket(len(roots)), min(row_bucket(longest), self.cache.capacity)
        program = self._programs.get(shape)
        if program is None:
            made = (self.model, self.cache, self.rotation, self._forward, self.graphs, shape, self._logits_of(shape[0]))
            program = self._programs[shape] = BlockProgram(*made)
        host = program.host.zero_()
        host[:, : len(roots)] = torch.tensor(
            [list(roots), [s.slot for s in sequences], [s.num_rows for s in sequences], [s.length for s in sequences]]
        )
        program.run()
        return program.logits

    def trees(
        self, sequences: Sequence[CachedSequence], wanted: Sequence[tuple[int, int, TreeOptions, SamplingParams]]
    ) -> list[DraftTree]:
        """A pass and its trees, one wait for both; `wanted` as in DeviceTrees.write, all of it for the device."""
        self.logits([root for root, *_ in wanted], sequences)
        width = max(width_of(options) for _, _, options, _ in wanted)
        num_nodes = max(options.tree_budget for _, _, options, _ in wanted) + 1
        vocab = self.model.config.vocab_size
        shape = (
            bucket(len(wanted)),
            min(next(size for size in WIDTHS if size >= width), vocab),
            next(size for size in NODES if size >= num_nodes),
        )
        trees, run = self._trees.get(shape) or self._new_trees(shape)
        trees.write(wanted)
        run()
        if self.model.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return trees.read(len(wanted))

    def can_make(self, options: TreeOptions, sampling: SamplingParams) -> bool:
        """Whether a tree is made on the device."""
        return self.kernels is not None and is_for_device(options, sampling, self.model.config.vocab_size)

    def _new_trees(self, shape: tuple[int, int, int]) -> tuple[DeviceTrees, Callable[[], None]]:
        assert self.kernels is not None
        s, width, num_nodes = shape
        logits = self._logits_of(s)
        sizes = (s, logits.shape[1], logits.shape[2])
        trees = DeviceTrees(self.kernels, sizes, width, num_nodes, self.model.device)
        self._trees[shape] = made = (trees, self.graphs.captured(partial(trees.run, logits)))
        return made

    def _logits_of(self, s: int) -> Tensor:
        if s not in self._logits:
            config = self.model.config
            is_plain = config.output_multiplier == 1.0 and config.final_logit_softcapping is None
            dtype = self.model.dtype if is_plain and not self.model.head.is_packed else torch.float32
            shape = (s, config.max_depth, config.vocab_size)
            self._logits[s] = torch.zeros(shape, dtype=dtype, device=self.model.device)
        return self._logits[s]
