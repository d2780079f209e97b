"""The target's pass over static buffers, behind operators over rows M = B * N: the way of a GPU."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from draftwood.device.compilation import mark_varying
from draftwood.device.layers import RMSNorm
from verify_service.cache.layer_views import LayerArguments, layer_arguments
from verify_service.gpu.buffers import StepBuffers
from verify_service.gpu.layers import ATTENTION_NAME, PreNormRows, can_fuse, prepare_layer, run_rows
from verify_service.gpu.operators import Pass, running
from verify_service.kernels.kernel_set import KernelSet
from verify_service.model.rope import angles
from verify_service.model.target import TargetModel, TargetParts

GROUP_SIZE = 4  # layers of a compiled graph; hybrids repeat after 4 layers, so that few kinds are compiled


class GraphTarget(TargetModel):
    """The model over rows. What a compiler would trace on a CPU, masks and windows of every tree, would make a graph of
    each shape here and could not be captured: kernels are opaque to it, and read the trees from the buffers."""

    def __init__(self, parts: TargetParts, kernels: KernelSet, page_size: int) -> None:
        super().__init__(parts, prepare_layer, ATTENTION_NAME)
        self.kernels, self.page_size = kernels, page_size
        self.is_capturable = all(self.has_graph)  # experts pick their tokens by data
        self.is_fused = self.is_capturable and isinstance(self.norm, RMSNorm) and all(map(can_fuse, self.layers))
        layers = [PreNormRows(layer) for layer in self.layers] if self.is_fused else self.layers_with_arguments()
        run = run_rows if self.is_fused else None
        groups = self.grouped(layers, cpp_wrapper=self.device.type == "cpu", run=run)
        self.layer_groups = groups.group_layers(GROUP_SIZE)

    def run(self, buffers: StepBuffers) -> list[Tensor]:
        """One pass: fills the tree metadata, the commit inputs and `hidden` [B, N, H]; returns the residual streams
        [1, M, H] behind the target layers."""
        trees, m = buffers.tree, buffers.b * buffers.n
        self.kernels.tree_metadata(trees)
        # Before the embedding: the sum with it may begin while that ends.
        nothing = torch.zeros(1, m, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        hidden = self.embedded(buffers.input_ids.view(1, m))
        rope = self.rope.at(trees.positions.view(1, m))
        arguments = layer_arguments(self.spec, buffers.commit_inputs.rows(), self.pools)
        run = self._run_fused if self.is_fused else self._run
        with running(Pass(self.kernels, trees, self.page_size)):
            after = run((nothing, hidden), rope, arguments, buffers.hidden.view(1, m, -1))
        return [after[i] for i in self.target_layer_ids]

    def logits_into(self, hidden: Tensor, out: Tensor) -> None:
        """Logits [M, vocab_size] of hidden states [M, H], into memory that is there."""
        if self.head.is_packed or self.head.bias is not None:
            out.copy_(self.head(hidden))
        else:
            torch.mm(hidden, self.head.weight.t(), out=out)
        self.scale_logits(out)

    def _run(self, start: tuple[Tensor, Tensor], rope: Any, arguments: LayerArguments, normed: Tensor) -> list[Tensor]:
        """The residual stream after each layer; the last one's norm goes into `normed` [1, M, H]."""
        _, hidden = start
        after: list[Tensor] = []
        for group in self.layer_groups:
            own = group.of(arguments)
            _mark_rows((hidden,), rope, own)
            after += group.run(group.layers, hidden, rope, None, own)
            hidden = after[-1]
        normed.copy_(self.norm(hidden))
        return after

    def _run_fused(
        self, start: tuple[Tensor, Tensor], rope: Any, arguments: LayerArguments, normed: Tensor
    ) -> list[Tensor]:
        """The same where sums go with norms: what is still to be added to the stream goes along with it."""
        stream, pending = start
        whole: list[Tensor] = []
        for group in self.layer_groups:
            own = group.of(arguments)
            _mark_rows((stream, pending), rope, own)
            *before, stream, pending = group.run(group.layers, (stream, pending), rope, None, own)
            whole += before
        total, norm = torch.empty_like(normed), cast("RMSNorm", self.norm)
        self.kernels.add_norm(stream[0], pending[0], norm.weight, norm.eps, total[0], normed[0])
        return [*whole[1:], total]


def _mark_rows(hidden: tuple[Tensor, ...], rope: Any, arguments: LayerArguments) -> None:
    """Tells the compiler that M varies; a graph of its own serves M = 1."""
    for tensor in (*hidden, *angles(rope)):
        mark_varying(tensor, 1)
    for argument in arguments:
        for view in argument.values():
            for tensor in view.written():
                mark_varying(tensor, 0)
