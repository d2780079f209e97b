"""A runner without the engine's thread: the test takes every step itself and looks into the pools."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwood.config import VerifyConfig
from draftwood.tree import DraftTree
from tests.verify_service.harness import ScriptedDrafter
from verify_service.build import build
from verify_service.cache.pools import Pools
from verify_service.core.events import Event, Finished
from verify_service.core.request import Request
from verify_service.core.sequence import SequenceState
from verify_service.cpu.step_inputs import StepInputs, StepRow, build_step_inputs
from verify_service.cpu.target import CommitInputs
from verify_service.kernels.kernel_set import KernelSet


def config_of(target: Path | str, **changes: Any) -> VerifyConfig:
    """float32, one thread, not compiled."""
    values: dict[str, Any] = {
        "target": str(target),
        "draft": "none",
        "drafter": "none",
        "dtype": "float32",
        "compile": False,
        "threads": 1,
        "max_batch": 4,
        "page_size": 4,
    }
    return VerifyConfig(**(values | changes))


class Bench:
    """A built service's runner, driven step by step."""

    def __init__(self, config: VerifyConfig, kernels: KernelSet | None = None) -> None:
        self.service = build(config, kernels=kernels)
        self.engine = self.service.engine
        self.runner: Any = self.engine.runner  # a PassRunner, or with kernels a GraphRunner
        self.scheduler = self.engine.scheduler
        self.pools: Pools = self.runner.pools
        self.last_stash: CommitInputs | None = None  # the model's own buffers
        self._next_id = 0

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int], new_tokens: int, chunk: int = 64, **settings: Any) -> SequenceState:
        """Admits and prefills a sequence and draws its first token."""
        sequence = self.admit(prompt, new_tokens, **settings)
        while not sequence.is_prefilled:
            self.runner.prefill([(sequence, min(chunk, sequence.num_to_prefill))])
        assert self.runner.first_token(sequence) is None
        return sequence

    @torch.inference_mode()
    def admit(self, prompt: Sequence[int], new_tokens: int, **settings: Any) -> SequenceState:
        """Admits a sequence."""
        self._next_id += 1
        request = Request(request_id="r", prompt_token_ids=tuple(prompt), max_new_tokens=new_tokens, **settings)
        sequence = SequenceState(self._next_id, request, _drop, time.perf_counter())
        self.scheduler.enqueue(sequence)
        assert self.scheduler.admit() == [sequence]
        self.runner.admit(sequence)
        return sequence

    @torch.inference_mode()
    def step(self, batch: Sequence[SequenceState], trees: dict[int, DraftTree]) -> list[Finished]:
        """One step with the given trees by sequence id."""
        drafter: Any = ScriptedDrafter(lambda s: trees.get(s.sequence_id))
        return [end for _, end in self.runner.step(batch, drafter)]

    @torch.inference_mode()
    def decode(self, sequence: SequenceState, base_length: int) -> None:
        """One token at a time until `base_length` tokens are committed."""
        while sequence.base_length < base_length:
            assert self.step([sequence], {}) == []

    def end(self, sequence: SequenceState) -> None:
        """Frees a sequence."""
        self.scheduler.remove(sequence)

    def build_step_inputs(self, rows: Sequence[StepRow]) -> StepInputs:
        """Inputs of a pass over the rows."""
        return build_step_inputs(rows, kernel_size=self.runner.target.spec.conv_kernel_size)

    @torch.inference_mode()
    def record(self, sequence: SequenceState, tree: DraftTree) -> CommitInputs:
        """What a pass over the tree would commit, for one sequence; nothing is committed."""
        row = StepRow(tree, sequence.base_length, sequence.slots, sequence.state_slot)
        commit_inputs = self.last_stash = self.runner.target.run(self.build_step_inputs([row])).commit_inputs
        return CommitInputs(**{name: buffer.clone() for name, buffer in buffers(commit_inputs).items()})

    def committed(self, sequence: SequenceState) -> dict[str, Tensor]:
        """Copies of everything that is committed of a sequence, by name."""
        rows = torch.from_numpy(sequence.slots[: sequence.base_length])
        return {
            "states": self.pools.states[:, sequence.state_slot].clone(),
            "windows": self.pools.windows[:, sequence.state_slot].clone(),
            "keys": self.pools.keys[:, :, rows].clone(),
            "values": self.pools.values[:, :, rows].clone(),
            "features": self.pools.features[rows].clone(),
        }


def buffers(commit_inputs: CommitInputs) -> dict[str, Tensor]:
    """The buffers by name."""
    return {spec.name: getattr(commit_inputs, spec.name) for spec in fields(commit_inputs)}


def _drop(event: Event) -> None:
    """Nobody listens."""
    del event
