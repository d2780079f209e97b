"""Commits of states and windows against the plain twin; any split of a path leaves the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.kernels.trees import underived_metadata
from draftwood.errors import UnsupportedModelError
from tests.kernels.trees import poisoned
from tests.verify_service.oracles import gdn_token, relative_error
from verify_service.cache.commit_inputs import CommitInputs
from verify_service.cache.pools import Pools
from verify_service.core.target_spec import GDN, MAMBA2, SHORT_CONV, RecurrentShape
from verify_service.kernels.arguments import Outcome, TreeMetadata
from verify_service.kernels.reference import commit as reference
from verify_service.kernels.triton.commit import recurrent_commit

LAYERS, BATCH, NODES = 2, 3, 11
BOTH_KINDS = pytest.mark.parametrize("kind", [GDN, MAMBA2])


@dataclass
class Case:
    """A commit of three rows, of which the second commits nothing, in slots 4, 0 and 2 of 6."""

    shape: RecurrentShape
    commit_inputs: CommitInputs
    outcome: Outcome
    pools: Pools
    tree: TreeMetadata

    @classmethod
    def draw(
        cls, device: torch.device, heads: tuple[int, int], dims: tuple[int, int], *, dtype: torch.dtype,
        kernel_size: int = 4, kind: str = GDN,
    ) -> Case:  # fmt: skip
        (hk, hv), (k, v) = heads, dims
        torch.manual_seed(kernel_size)
        channels = 2 * hk * k + hv * v
        nothing = torch.empty(0, device=device)
        conv = torch.randn(LAYERS, BATCH, NODES, channels)
        keys = conv[..., : 2 * hk * k].unflatten(-1, (2 * hk, k))
        norms = 1 / keys.norm(dim=-1) if kind == GDN else poisoned(*keys.shape[:-1], device=conv.device)
        commit_inputs = CommitInputs(
            keys=nothing,
            values=nothing,
            inputs=torch.randn(LAYERS, BATCH, NODES, channels).to(device, dtype),
            conv=conv.to(device, dtype),
            norms=norms.to(device),
            g=-torch.rand(LAYERS, BATCH, NODES, hv).to(device),
            beta=torch.rand(LAYERS, BATCH, NODES, hv).to(device),
        )
        states = poisoned(LAYERS, 6, hv, v, k, device=device)
        windows = poisoned(LAYERS, 6, kernel_size - 1, channels, dtype=dtype, device=device)
        for slot in (4, 2):
            states[:, slot] = torch.randn(LAYERS, hv, v, k).to(device)
            windows[:, slot] = torch.randn(LAYERS, kernel_size - 1, channels).to(device, dtype)
        paths = [[0, 1, 4, 5, 9, 10], [0, 1, 2, 3, 4, 5], [0, 7, 0, 0, 0, 0]]
        path, length, slots = (
            torch.tensor(rows, dtype=torch.int32, device=device) for rows in (paths, [6, 0, 2], [4, 0, 2])
        )
        tree = replace(underived_metadata([[-1]] * BATCH, NODES, device), state_slots=slots)
        shape = RecurrentShape(kind, hk, hv, k, v, channels, kernel_size)
        return cls(
            shape, commit_inputs, Outcome(path, length, nothing, nothing),
            Pools(nothing, nothing, nothing, states, windows), tree,
        )  # fmt: skip

    def run(self, *, plain: bool = False) -> Pools:
        """States and windows afterwards; its own stay as they are."""
        pools = replace(self.pools, states=self.pools.states.clone(), windows=self.pools.windows.clone())
        kernel = reference.recurrent_commit if plain else recurrent_commit
        kernel(self.shape, self.commit_inputs, self.outcome, pools, self.tree)
        return pools


def compare(case: Case) -> None:
    got, wanted = case.run(), case.run(plain=True)
    assert torch.equal(got.states.isnan(), wanted.states.isnan())
    assert relative_error(got.states.nan_to_num(), wanted.states.nan_to_num().double()) < 1e-6
    assert torch.equal(got.windows.nan_to_num(), wanted.windows.nan_to_num())
    assert torch.equal(got.windows.isnan(), wanted.windows.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@BOTH_KINDS
def test_is_the_recurrence(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    compare(Case.draw(device, (2, 4), (32, 16), dtype=dtype, kind=kind))


@pytest.mark.parametrize("kernel_size", [2, 3, 4])
def test_windows_of_a_short_convolution(kernel_size: int, device: torch.device) -> None:
    case = Case.draw(device, (1, 1), (16, 16), dtype=torch.float32, kernel_size=kernel_size)
    compare(replace(case, shape=replace(case.shape, kind=SHORT_CONV)))


@BOTH_KINDS
def test_any_split_of_a_path_leaves_the_same_bits(kind: str, device: torch.device) -> None:
    check_splits(Case.draw(device, (1, 3), (32, 16), dtype=torch.bfloat16, kind=kind))


def check_splits(case: Case) -> None:
    whole, path, length = case.run(), case.outcome.path, case.outcome.path_length
    for cuts in ([1] * 6, [2, 4], [5, 1]):
        pools, start = case.pools, 0
        for cut in cuts:
            part = replace(case.outcome, path=path.roll(-start, 1), path_length=(length - start).clamp(0, cut))
            pools = replace(case, outcome=part, pools=pools).run()
            start += cut
        assert torch.equal(pools.states.nan_to_num(), whole.states.nan_to_num())
        assert torch.equal(pools.windows.nan_to_num(), whole.windows.nan_to_num())


def test_twin_is_the_oracle(device: torch.device) -> None:
    case = Case.draw(device, (1, 3), (16, 16), dtype=torch.float32)
    after, left = case.run(plain=True), case.commit_inputs
    state = case.pools.states[0, 4].double()
    for node in case.outcome.path[0].tolist():
        k = left.conv[0, 0, node, 16:32].double() * left.norms[0, 0, node, 1].double()
        v = left.conv[0, 0, node, 32:].double().view(3, 16)
        state = gdn_token(state, k[None], v, left.g[0, 0, node].double(), left.beta[0, 0, node].double())
    assert relative_error(after.states[0, 4], state) < 1e-6
    assert torch.equal(after.windows[:, 4], left.inputs[:, 0, [5, 9, 10]])


def test_shapes_that_are_refused(device: torch.device) -> None:
    with pytest.raises(UnsupportedModelError, match="linear_value_head_dim must be 16, 32, 64, 128 or 256, not 20"):
        Case.draw(device, (1, 1), (16, 20), dtype=torch.float32).run()
    with pytest.raises(UnsupportedModelError, match="conv_kernel must be 2 to 4, not 6"):
        Case.draw(device, (1, 1), (16, 16), dtype=torch.float32, kernel_size=6).run()


@pytest.mark.gpu
@BOTH_KINDS
def test_served_sizes(kind: str, device: torch.device) -> None:
    case = Case.draw(device, (16, 48), (128, 128), dtype=torch.bfloat16, kind=kind)
    compare(case)
    check_splits(case)
