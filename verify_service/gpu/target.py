"""The target's pass over static buffers: from token ids to hidden states, and from those to logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from draftwood.device.layers import RMSNorm, packed
from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import ATTENTION, TargetSpec
from verify_service.gpu import layers as rows
from verify_service.gpu.buffers import StepBuffers
from verify_service.gpu.fused_pre_norm import PreNormRows, can_fuse, run_rows
from verify_service.gpu.operators import Pass, running
from verify_service.kernels.kernel_set import KernelSet
from verify_service.model.layer_groups import LayerGroups, kind_of, own_storage
from verify_service.model.parts import read_parts
from verify_service.model.pre_norm import with_arguments
from verify_service.model.replace_layers import replaced_norm
from verify_service.model.rope import MAX_DEPTH_MARGIN, RopeTables

Arguments = list[dict[str, Any]]  # each layer's

GROUP_SIZE = 4  # layers a compiled graph; hybrids repeat after 4 layers, so that few kinds are compiled


class GraphTarget:
    """The model in its serving form over rows M = B * N. Runs on one thread at a time."""

    def __init__(
        self,
        model: Any,
        spec: TargetSpec,
        pools: Pools,
        kernels: KernelSet,
        *,
        target_layer_ids: tuple[int, ...],
        max_context: int,
        page_size: int,
        compile_steps: bool,
    ) -> None:
        self.spec, self.pools, self.kernels, self.page_size = spec, pools, kernels, page_size
        self.target_layer_ids, self.dtype, self.device = target_layer_ids, model.dtype, model.device
        model.config._attn_implementation = rows.NAME
        body = read_parts(model)
        self.embed = body.embed
        like = torch.zeros(1, dtype=self.dtype, device=self.device)
        self.rope = RopeTables(body.rotary, spec.layer_types, max_context + MAX_DEPTH_MARGIN, like)
        parts = enumerate(zip(body.layers, spec.mixers, strict=True))
        has_graph = [rows.prepare_layer(layer, i, mixers) for i, (layer, mixers) in parts]
        self.is_capturable = all(has_graph)  # experts pick their tokens by data
        self.norm, self.head = replaced_norm(body.norm), packed(body.head)
        self.is_fused = self.is_capturable and isinstance(self.norm, RMSNorm) and all(map(can_fuse, body.layers))
        if self.is_fused:
            layers = [PreNormRows(layer) for layer in body.layers]
        else:
            of_types = zip(body.layers, spec.layer_types, strict=True)
            layers = [self.rope.picking(with_arguments(layer), kind) for layer, kind in of_types]
        kinds = [kind_of(layer) if has else None for layer, has in zip(layers, has_graph, strict=True)]
        run = run_rows if self.is_fused else None
        is_cpu = self.device.type == "cpu"
        self.layer_groups = LayerGroups(layers, kinds, compile_steps=compile_steps, cpp_wrapper=is_cpu, run=run).cut(
            GROUP_SIZE
        )

    def run(self, buffers: StepBuffers) -> list[Tensor]:
        """One pass: fills the structure, the commit inputs and `hidden` [B, N, H]; returns the tapped residual streams
        [1, M, H]. Changes no committed state."""
        s, m = buffers.structure, buffers.b * buffers.n
        self.kernels.tree_metadata(s)
        # Before the embedding: the sum with it may begin while that ends.
        nothing = torch.zeros(1, m, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        hidden = self.embed(buffers.input_ids.view(1, m))
        if self.spec.embedding_factor != 1.0:
            hidden = hidden * self.spec.embedding_factor
        rope = self.rope.at(s.positions.view(1, m))
        arguments = list(_arguments(self.spec, buffers.commit_inputs, self.pools, m))
        with running(Pass(self.kernels, s, self.page_size)):
            run = self._run_fused if self.is_fused else self._run
            after = run((nothing, hidden), rope, arguments, buffers.hidden.view(1, m, -1))
        return [after[i] for i in self.target_layer_ids]

    def _run(self, start: tuple[Tensor, Tensor], rope: Any, arguments: Arguments, normed: Tensor) -> list[Tensor]:
        """The residual stream after each layer; the last one's norm goes into `normed` [1, M, H]."""
        _, hidden = start
        after: list[Tensor] = []
        for group in self.layer_groups:
            extra = arguments[group.first : group.first + len(group.layers)]
            _mark_rows((hidden,), rope, extra)
            after += group.run(group.layers, hidden, rope, None, extra)
            hidden = after[-1]
        normed.copy_(self.norm(hidden))
        return after

    def _run_fused(self, start: tuple[Tensor, Tensor], rope: Any, arguments: Arguments, normed: Tensor) -> list[Tensor]:
        """The same where sums go with norms: what is still to be added to the stream goes along with it."""
        stream, pending = start
        whole: list[Tensor] = []
        for group in self.layer_groups:
            extra = arguments[group.first : group.first + len(group.layers)]
            _mark_rows((stream, pending), rope, extra)
            *before, stream, pending = group.run(group.layers, (stream, pending), rope, None, extra)
            whole += before
        total, norm = torch.empty_like(normed), cast("RMSNorm", self.norm)
        self.kernels.add_norm(stream[0], pending[0], norm.weight, norm.eps, total[0], normed[0])
        return [*whole[1:], total]

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] to [M, vocabulary], in the model's format."""
        out = hidden.new_empty(hidden.shape[0], self.spec.vocab_size)
        self.logits_into(hidden, out)
        return out

    def logits_into(self, hidden: Tensor, out: Tensor) -> None:
        """The same into memory that is there."""
        if self.head.is_packed or self.head.bias is not None:
            out.copy_(self.head(hidden))
        else:
            torch.mm(hidden, self.head.weight.t(), out=out)
        if self.spec.logit_factor != 1.0:
            out.mul_(self.spec.logit_factor)
        if (cap := self.spec.logit_cap) is not None:
            out.div_(cap).tanh_().mul_(cap)


def _arguments(spec: TargetSpec, commit_inputs: CommitInputs, pools: Pools, m: int) -> Iterator[dict[str, Any]]:
    """Each layer's view of the committed state and the commit inputs, as its keyword arguments."""
    attention = recurrent = 0
    for mixers in spec.mixers:
        arguments: dict[str, Any] = {}
        if ATTENTION in mixers:
            keys, values = (_rows(t, attention, m) for t in (commit_inputs.keys, commit_inputs.values))
            pooled = (own_storage(pools.keys[attention]), own_storage(pools.values[attention]))
            arguments["attention"] = rows.AttentionRows(*pooled, keys, values)
            attention += 1
        if spec.is_recurrent(mixers):
            written = (
                commit_inputs.inputs,
                commit_inputs.conv,
                commit_inputs.norms,
                commit_inputs.g,
                commit_inputs.beta,
            )
            state = (own_storage(pools.states[recurrent]), own_storage(pools.windows[recurrent]))
            arguments["recurrent"] = rows.RecurrentRows(*state, *(_rows(t, recurrent, m) for t in written))
            recurrent += 1
        yield arguments


def _rows(tensor: Tensor, layer: int, m: int) -> Tensor:
    """[layers, B, N, ...] to the layer's [M, ...]."""
    return own_storage(tensor[layer].view(m, *tensor.shape[3:]))


def _mark_rows(hidden: tuple[Tensor, ...], rope: Any, arguments: Arguments) -> None:
    """Tells the compiler that M varies; a graph of its own serves M = 1."""
    if hidden[0].shape[1] == 1:
        return
    mark: Any = torch._dynamo.maybe_mark_dynamic  # pyright: ignore[reportPrivateUsage]
    for tensor in hidden:
        mark(tensor, 1)
    angles = [t for pair in rope.values() for t in pair] if isinstance(rope, dict) else rope or ()
    for tensor in angles:
        mark(tensor, 1)
    for argument in arguments:
        if (attention := argument.get("attention")) is not None:
            mark(attention.keys, 0)
            mark(attention.values, 0)
        if (recurrent := argument.get("recurrent")) is not None:
            for tensor in (recurrent.inputs, recurrent.conv, recurrent.norms, recurrent.g, recurrent.beta):
                mark(tensor, 0)
