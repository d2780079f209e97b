"""Gated DeltaNet over trees against the recurrence along every path in float64; odd shapes, dirty scratch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from draftwood.errors import UnsupportedModelError
from tests.kernels.trees import Trees, poisoned
from tests.verify_service.oracles import REGIMES, RecurrentInputs, draw_gdn, gdn_paths, relative_error
from verify_service.kernels.arguments import GatedNorm, LayerCommitInputs
from verify_service.kernels.reference import gdn_verify as reference
from verify_service.kernels.triton.gdn_verify import GdnVerify

TOLERANCE = 2e-6


@dataclass
class Layer:
    """The kernel's view of inputs of the oracle."""

    drawn: RecurrentInputs
    conv: Tensor
    norms: Tensor
    states: Tensor

    @classmethod
    def of(cls, drawn: RecurrentInputs, device: torch.device, dtype: torch.dtype) -> Layer:
        """q and k with lengths that the norms take away; in 16 bits, `drawn` becomes what is left of them."""
        b, _n, hk, dk = drawn.k.shape
        hv, dv = drawn.v.shape[2:]
        raw = torch.cat([drawn.q * 1.5, drawn.k * 0.7], 2).to(dtype).float()  # [B, N, 2 HK, K]
        norms = 1.0 / raw.double().norm(dim=-1)
        q, k = (raw.double() * norms[..., None]).split(hk, 2)
        v = drawn.v.to(dtype).float()
        conv = torch.cat([raw.flatten(2), v.flatten(2)], -1).to(dtype)
        states = torch.full((b + 2, hv, dv, dk), torch.nan)
        states[torch.arange(b, 0, -1)] = drawn.state
        exact = replace(drawn, q=q, k=k, v=v, g=drawn.g.to(device), beta=drawn.beta.to(device))
        return cls(exact, conv.to(device), norms.float().to(device), states.to(device))

    def run(self, trees: Trees, *, norm: GatedNorm | None = None, plain: bool = False) -> Tensor:
        b, n, _ = self.conv.shape
        hv, dv = self.drawn.v.shape[2:]
        device = self.conv.device
        dtype = torch.float32 if norm is None else norm.gate.dtype
        out = poisoned(b, n, hv, dv, dtype=dtype, device=device)
        before = self.states.clone()
        nothing = torch.empty(0, device=device)
        inputs = LayerCommitInputs(nothing, self.conv, self.norms, self.drawn.g, self.drawn.beta)
        kernel = reference.gdn_verify if plain else dirty_kernel(b, n, hv, dv, device)
        kernel(inputs, trees.metadata, self.states, norm, out)
        assert torch.equal(self.states.nan_to_num(), before.nan_to_num())  # a verify pass changes no committed state
        assert not out.isnan().any()
        return out


def dirty_kernel(b: int, n: int, hv: int, dv: int, device: torch.device) -> GdnVerify:
    """The launcher, its scratch memory full of NaN."""
    kernel = GdnVerify()
    scratch = kernel.scratch(b, n, hv, dv, device)
    for tensor in (scratch.matrices, scratch.factors, scratch.solve, scratch.carried):
        tensor.fill_(torch.nan)
    return kernel


def oracle(layer: Layer, trees: Trees) -> Tensor:
    """Outputs in float64, on the CPU."""
    return gdn_paths(replace(layer.drawn, g=layer.drawn.g.cpu(), beta=layer.drawn.beta.cpu()), trees.parents_of)


def check(layer: Layer, trees: Trees, tolerance: float = TOLERANCE) -> None:
    """Nodes of the trees against the oracle; spare nodes may give anything but NaN."""
    got, wanted = layer.run(trees).cpu(), oracle(layer, trees)
    for b, tree in enumerate(trees.parents_of):
        assert relative_error(got[b, : len(tree)], wanted[b, : len(tree)]) < tolerance


@pytest.mark.parametrize(
    ("n", "regime"), [(1, "iid"), (2, "silu"), *product((17, 40), REGIMES), (64, "repeated")]
)  # blocks of 16, 32 and 64
def test_is_the_recurrence_along_every_path(n: int, regime: str, device: torch.device) -> None:
    drawn = draw_gdn(n, regime, 2, n, (1, 3), (32, 16))
    check(Layer.of(drawn, device, torch.float32), Trees.draw(n, 2, n, device, spare=n // 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 20])
def test_rounded_inputs_lose_nothing_more(n: int, dtype: torch.dtype, device: torch.device) -> None:
    drawn = draw_gdn(n, "silu", 1, n, (2, 2), (16, 32))
    check(Layer.of(drawn, device, dtype), Trees.draw(n, 1, n, device))


@pytest.mark.parametrize("n", [65, 150])
def test_more_than_one_block(n: int, device: torch.device) -> None:
    drawn = draw_gdn(n, "silu", 1, n, (1, 2), (16, 16))
    check(Layer.of(drawn, device, torch.bfloat16), Trees.draw(n, 1, n, device, spare=3))


def test_chain_of_a_prompt(device: torch.device) -> None:
    """Deeper than any draft: every node of a block is on every later node's path."""
    drawn = draw_gdn(3, "repeated", 1, 130, (1, 1), (32, 16))
    check(Layer.of(drawn, device, torch.float32), Trees.of([[i - 1 for i in range(130)]], 130, device), 4e-6)


def test_strong_decay(device: torch.device) -> None:
    """Masked before the exponential: between siblings e^(G_i - G_j) has no bound."""
    drawn = draw_gdn(5, "iid", 1, 30, (1, 2), (16, 16))
    drawn = replace(drawn, g=drawn.g * 200)
    check(Layer.of(drawn, device, torch.float32), Trees.draw(5, 1, 30, device), 2e-5)


@pytest.mark.parametrize("n", [24, 80])
def test_siblings_do_not_matter(n: int, device: torch.device) -> None:
    check_siblings(n, Layer.of(draw_gdn(n, "silu", 1, n, (1, 2), (16, 16)), device, torch.bfloat16), device)


def check_siblings(n: int, layer: Layer, device: torch.device) -> None:
    """Bit for bit: everything off a node's path is replaced by what shows, and overflows along none of their paths."""
    trees = Trees.draw(n, 1, n, device)
    got = layer.run(trees)
    leaf = max(range(n), key=lambda i: bin(int(trees.metadata.ancestors[0, i, 0])).count("1"))
    word, bit = trees.metadata.ancestors[0, leaf], torch.arange(n, device=device)
    off = ((word[bit // 64] >> (bit % 64)) & 1) == 0
    assert off.any()
    for factor, decay in ((-10.0, 0.0), (0.0, -80.0)):
        conv, g, beta = layer.conv.clone(), layer.drawn.g.clone(), layer.drawn.beta.clone()
        conv[0, off] *= factor
        g[0, off] = decay
        beta[0, off] = 1.0 - beta[0, off]
        other = replace(layer, conv=conv, drawn=replace(layer.drawn, g=g, beta=beta)).run(trees)
        assert torch.equal(other[0, ~off], got[0, ~off])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 20, 70])
def test_leaves_through_the_gated_norm(n: int, dtype: torch.dtype, device: torch.device) -> None:
    b = 1 if n > 64 else 2
    layer = Layer.of(draw_gdn(n, "iid", b, n, (1, 2), (16, 16)), device, dtype)
    trees = Trees.draw(n, b, n, device)
    projection = torch.randn(b, n, 50, generator=torch.Generator().manual_seed(n)).to(device, dtype)
    for weight_dtype in dict.fromkeys((torch.float32, dtype)):
        norm = GatedNorm(projection[..., 7:39], torch.rand(16).to(device, weight_dtype), 1e-6)
        error = relative_error(layer.run(trees, norm=norm), layer.run(trees, norm=norm, plain=True).double())
        # The interpreter cuts bfloat16 off where a GPU rounds, at each of four places.
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)


def test_twin_is_the_oracle(device: torch.device) -> None:
    trees = Trees.draw(1, 2, 70, device)
    layer = Layer.of(draw_gdn(1, "silu", 2, 70, (2, 4), (16, 16)), device, torch.float32)
    got = layer.run(trees, plain=True).cpu()
    assert relative_error(got, oracle(layer, trees)) < TOLERANCE


def test_shapes_that_are_refused(device: torch.device) -> None:
    layer = Layer.of(draw_gdn(0, "iid", 1, 2, (1, 1), (24, 16)), device, torch.float32)
    with pytest.raises(UnsupportedModelError, match="linear_key_head_dim must be 16, 32, 64, 128 or 256, not 24"):
        layer.run(Trees.draw(0, 1, 2, device))
    layer = Layer.of(draw_gdn(0, "iid", 1, 257, (1, 1), (16, 16)), device, torch.float32)
    with pytest.raises(UnsupportedModelError, match="tree_budget allows 256 nodes, not 257"):
        layer.run(Trees.of([[i - 1 for i in range(257)]], 257, device))


@pytest.mark.gpu
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("n", [1, 16, 32, 64, 128, 256])
def test_served_sizes(n: int, regime: str, device: torch.device) -> None:
    drawn = draw_gdn(n, regime, 1, n, (16, 48), (128, 128))
    check(Layer.of(drawn, device, torch.bfloat16), Trees.of([_parents(n)], n, device))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [32, 64, 128])
def test_siblings_do_not_matter_at_served_sizes(n: int, device: torch.device) -> None:
    check_siblings(n, Layer.of(draw_gdn(n, "silu", 1, n, (16, 48), (128, 128)), device, torch.bfloat16), device)


@pytest.mark.gpu
@pytest.mark.parametrize("b", [1, 8])  # a program has whole heads, or halves and leaves the norm to a second kernel
@pytest.mark.parametrize("n", [1, 16, 64, 128])
def test_leaves_through_the_gated_norm_at_served_sizes(n: int, b: int, device: torch.device) -> None:
    layer = Layer.of(draw_gdn(n, "silu", b, n, (16, 48), (128, 128)), device, torch.bfloat16)
    trees = Trees.of([_parents(n)] * b, n, device)
    projection = torch.randn(b, n, 6240, generator=torch.Generator().manual_seed(n)).to(device, torch.bfloat16)
    norm = GatedNorm(projection[..., :6144], torch.rand(128).to(device, torch.bfloat16), 1e-6)
    error = relative_error(layer.run(trees, norm=norm), layer.run(trees, norm=norm, plain=True).double())
    assert error < 2e-3  # a last bit of bfloat16 here and there


def _parents(n: int) -> list[int]:
    """As bushy as drafts are: half of the nodes within a short way of the root."""
    rng = random.Random(n)
    return [-1, *(rng.randrange(max(0, i - 12), i) for i in range(1, n))]
