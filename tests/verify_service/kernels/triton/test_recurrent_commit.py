"""Commits of states and windows against the plain twin; any split of a path leaves the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from draftwood.errors import UnsupportedModelError
from tests.kernels.trees import poisoned
from tests.verify_service.oracles import gdn_token, relative_error
from verify_service.kernels.triton.recurrent_commit import RecurrentInputs, recurrent_commit, recurrent_commit_plain

LAYERS, BATCH, NODES, DEPTH = 2, 3, 11, 6


@dataclass
class CommitInputs:
    """Inputs of a commit: three rows, of which the second commits nothing, in slots 4, 0 and 2 of 6."""

    recurrent: RecurrentInputs | None
    inputs: Tensor
    path: Tensor
    length: Tensor
    states: Tensor
    windows: Tensor
    slots: Tensor

    @classmethod
    def draw(
        cls, device: torch.device, heads: tuple[int, int], dims: tuple[int, int], *, dtype: torch.dtype,
        kernel_size: int = 4, is_delta: bool = True,
    ) -> CommitInputs:  # fmt: skip
        (hk, hv), (k, v) = heads, dims
        torch.manual_seed(kernel_size)
        channels = 2 * hk * k + hv * v
        conv = torch.randn(LAYERS, BATCH, NODES, channels)
        keys = conv[..., : 2 * hk * k].unflatten(-1, (2 * hk, k))
        recurrent = RecurrentInputs(
            conv.to(device, dtype),
            (1 / keys.norm(dim=-1)).to(device) if is_delta else None,
            -torch.rand(LAYERS, BATCH, NODES, hv).to(device),
            torch.rand(LAYERS, BATCH, NODES, hv).to(device),
        )
        states = poisoned(LAYERS, 6, hv, v, k, device=device)
        windows = poisoned(LAYERS, 6, kernel_size - 1, channels, dtype=dtype, device=device)
        for slot in (4, 2):
            states[:, slot] = torch.randn(LAYERS, hv, v, k).to(device)
            windows[:, slot] = torch.randn(LAYERS, kernel_size - 1, channels).to(device, dtype)
        return cls(
            recurrent,
            torch.randn(LAYERS, BATCH, NODES, channels).to(device, dtype),
            torch.tensor(
                [[0, 1, 4, 5, 9, 10], [0, 1, 2, 3, 4, 5], [0, 7, 0, 0, 0, 0]], dtype=torch.int32, device=device
            ),
            torch.tensor([6, 0, 2], dtype=torch.int32, device=device),
            states,
            windows,
            torch.tensor([4, 0, 2], dtype=torch.int32, device=device),
        )

    def run(self, snapshots: Tensor | None = None, *, plain: bool = False) -> tuple[Tensor, Tensor]:
        """States and windows afterwards; its own stay as they are."""
        states, windows = self.states.clone(), self.windows.clone()
        kernel = recurrent_commit_plain if plain else recurrent_commit
        kernel(self.recurrent, self.inputs, self.path, self.length, states, windows, self.slots, snapshots)
        return states, windows


def compare(commit_inputs: CommitInputs, snapshots: Tensor | None = None) -> None:
    states, windows = commit_inputs.run(snapshots)
    wanted_states, wanted_windows = commit_inputs.run(snapshots, plain=True)
    assert torch.equal(states.isnan(), wanted_states.isnan())
    assert relative_error(states.nan_to_num(), wanted_states.nan_to_num().double()) < 1e-6
    assert torch.equal(windows.nan_to_num(), wanted_windows.nan_to_num())
    assert torch.equal(windows.isnan(), wanted_windows.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_delta", [True, False], ids=["gated delta net", "mamba2"])
def test_is_the_recurrence(is_delta: bool, dtype: torch.dtype, device: torch.device) -> None:
    compare(CommitInputs.draw(device, (2, 4), (32, 16), dtype=dtype, is_delta=is_delta))


@pytest.mark.parametrize("kernel_size", [2, 3, 4])
def test_windows_of_a_short_convolution(kernel_size: int, device: torch.device) -> None:
    commit_inputs = CommitInputs.draw(device, (1, 1), (16, 16), dtype=torch.float32, kernel_size=kernel_size)
    compare(replace(commit_inputs, recurrent=None))


@pytest.mark.parametrize("is_delta", [True, False], ids=["gated delta net", "mamba2"])
def test_any_split_of_a_path_leaves_the_same_bits(is_delta: bool, device: torch.device) -> None:
    check_splits(CommitInputs.draw(device, (1, 3), (32, 16), dtype=torch.bfloat16, is_delta=is_delta))


def check_splits(commit_inputs: CommitInputs) -> None:
    states, windows = commit_inputs.run()
    for cuts in ([1] * 6, [2, 4], [5, 1]):
        part, start = commit_inputs, 0
        for cut in cuts:
            path = commit_inputs.path.roll(-start, 1)
            length = (commit_inputs.length - start).clamp(0, cut)
            part = replace(part, path=path, length=length)
            part = replace(part, **dict(zip(("states", "windows"), part.run(), strict=True)))
            start += cut
        assert torch.equal(part.states.nan_to_num(), states.nan_to_num())
        assert torch.equal(part.windows.nan_to_num(), windows.nan_to_num())


def test_snapshots_are_the_states_of_shorter_paths(device: torch.device) -> None:
    commit_inputs = CommitInputs.draw(device, (1, 2), (16, 16), dtype=torch.float32)
    snapshots = torch.zeros(BATCH, DEPTH, dtype=torch.int32, device=device)
    snapshots[0, 0], snapshots[0, 3] = 1, 5
    snapshots[1, 2] = 3  # of a row that commits nothing
    compare(commit_inputs, snapshots)
    states, windows = commit_inputs.run(snapshots)
    for position, slot in ((0, 1), (3, 5)):
        length = torch.tensor([position + 1, 0, 0], dtype=torch.int32, device=device)
        short_states, short_windows = replace(commit_inputs, length=length).run()
        assert torch.equal(states[:, slot], short_states[:, 4])
        assert torch.equal(windows[:, slot], short_windows[:, 4])
    assert states[:, 3].isnan().all()


def test_twin_is_the_oracle(device: torch.device) -> None:
    commit_inputs = CommitInputs.draw(device, (1, 3), (16, 16), dtype=torch.float32)
    states, windows = commit_inputs.run(plain=True)
    recurrent = commit_inputs.recurrent
    assert recurrent is not None
    assert recurrent.norms is not None
    state = commit_inputs.states[0, 4].double()
    for node in commit_inputs.path[0].tolist():
        k = recurrent.conv[0, 0, node, 16:32].double() * recurrent.norms[0, 0, node, 1].double()
        v = recurrent.conv[0, 0, node, 32:].double().view(3, 16)
        state = gdn_token(state, k[None], v, recurrent.g[0, 0, node].double(), recurrent.beta[0, 0, node].double())
    assert relative_error(states[0, 4], state) < 1e-6
    assert torch.equal(windows[:, 4], commit_inputs.inputs[:, 0, [5, 9, 10]])


def test_shapes_that_are_refused(device: torch.device) -> None:
    with pytest.raises(UnsupportedModelError, match="linear_value_head_dim must be 16, 32, 64, 128 or 256, not 20"):
        CommitInputs.draw(device, (1, 1), (16, 20), dtype=torch.float32).run()
    with pytest.raises(UnsupportedModelError, match="conv_kernel must be 2 to 4, not 6"):
        CommitInputs.draw(device, (1, 1), (16, 16), dtype=torch.float32, kernel_size=6).run()


@pytest.mark.gpu
@pytest.mark.parametrize("is_delta", [True, False], ids=["gated delta net", "mamba2"])
def test_served_sizes(is_delta: bool, device: torch.device) -> None:
    commit_inputs = CommitInputs.draw(device, (16, 48), (128, 128), dtype=torch.bfloat16, is_delta=is_delta)
    compare(commit_inputs)
    check_splits(commit_inputs)
