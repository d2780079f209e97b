"""What runs on the device for one bucket: verify, commit, and both in one; each a graph where that is possible.

Nothing in a step returns to the host between verify and commit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from draftwood.device.graphs import Graphs
from verify_service.gpu.buffers import StepBuffers
from verify_service.gpu.target import GraphTarget
from verify_service.model.features import FeatureProjector


class StepGraphs:
    """The step of one bucket: B rows of N nodes."""

    def __init__(
        self,
        target: GraphTarget,
        buffers: StepBuffers,
        logits: Tensor,  # [B N, vocab_size] where the pass leaves them
        projector: FeatureProjector | None,
        graphs: Graphs,
    ) -> None:
        self.target, self.buffers, self.projector, self.graphs = target, buffers, projector, graphs
        self.logits = logits.view(buffers.b, buffers.n, -1)
        m, width = buffers.b * buffers.n, len(target.target_layer_ids) * target.spec.hidden_size
        self._target_features = torch.zeros(m, width, dtype=target.dtype, device=target.device)
        self._captured: dict[tuple[str | bool, ...], Callable[[], None]] = {}

    def step(self, *, has_filters: bool) -> None:
        """From the host's inputs to the host's results, all rows drawn and committed on the device."""
        self._run(self._step, has_filters)

    def verify(self, *, has_filters: bool) -> None:
        """As far as the accept walk: what it decided is back on the host, nothing is committed."""
        self._run(self._verify, has_filters)

    def prefill(self) -> None:
        """A pass over prompts, without draws: commit inputs and hidden states."""
        self._run(self._pass)

    def commit(self) -> None:
        """Commits what the host says: paths and their lengths in `buffers.result.host`, after a pass."""
        self._run(self._commit_given)

    def _run(self, function: Callable[..., None], *arguments: bool) -> None:
        """Runs it as a graph, made at the first call over spare rows, of which nothing is committed."""
        key = (function.__name__, *arguments)
        run = self._captured.get(key)
        if run is None:
            host = (self.buffers.inputs.on_host, self.buffers.result.on_host)
            saved = [memory.clone() for memory in host]
            self.buffers.clear()
            run = self._captured[key] = self.graphs.captured(partial(function, *arguments))
            for memory, before in zip(host, saved, strict=True):
                memory.copy_(before)
        run()

    def _step(self, has_filters: bool) -> None:
        self._draw(has_filters)
        self._commit()
        self.buffers.result.fetch()

    def _verify(self, has_filters: bool) -> None:
        self._draw(has_filters)
        self.buffers.result.fetch()

    def _commit_given(self) -> None:
        self.buffers.result.send()
        self._commit()

    def _pass(self) -> None:
        buffers = self.buffers
        buffers.inputs.send()
        target_features = self.target.run(buffers)
        if target_features:
            torch.cat([t[0] for t in target_features], -1, out=self._target_features)

    def _draw(self, has_filters: bool) -> None:
        self._pass()
        buffers, kernels = self.buffers, self.target.kernels
        hidden = buffers.hidden.flatten(0, 1)
        self.target.logits_into(hidden, self.logits.view(hidden.shape[0], -1))
        kernels.sample(self.logits, buffers.tree, buffers.draws, buffers.drawn, has_filters=has_filters)
        kernels.accept_walk(buffers.input_ids, buffers.tree, buffers.drawn, buffers.draws, buffers.outcome)

    def _commit(self) -> None:
        buffers, target, kernels = self.buffers, self.target, self.target.kernels
        s, outcome, pools, spec = buffers.tree, buffers.outcome, target.pools, target.spec
        if spec.recurrent is not None:
            kernels.recurrent_commit(spec.recurrent, buffers.commit_inputs, outcome, pools, s)
        if spec.num_attention_layers:
            kernels.kv_commit(buffers.commit_inputs, outcome, pools, s, target.page_size)
        if self.projector is not None and self._target_features.shape[1]:
            rows, slots = self._path_rows(), self._path_slots()
            pools.features.index_copy_(0, slots, self.projector.project(self._target_features.index_select(0, rows)))

    def _path_rows(self) -> Tensor:
        """Rows of the pass on the paths, those past the ends too: int64 [B D_path]."""
        path = self.buffers.outcome.path.long().clamp(min=0)
        first = torch.arange(0, path.shape[0] * self.buffers.n, self.buffers.n, device=path.device)
        return (path + first[:, None]).view(-1)

    def _path_slots(self) -> Tensor:
        """Pool rows of the paths' positions, the scratch slot past the ends: int64 [B D_path]."""
        s, outcome, size = self.buffers.tree, self.buffers.outcome, self.target.page_size
        along = torch.arange(outcome.path.shape[1], device=outcome.path.device)
        at = s.base_lengths[:, None].long() + along
        page = s.page_table.long().gather(1, (at // size).clamp(max=s.page_table.shape[1] - 1))
        return torch.where(along < outcome.path_length[:, None], page * size + at % size, 0).view(-1)
