"""Feature rows against transformers' hidden states, projected by hand; also behind accepted trees (field bug 14)."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5ForCausalLM

from draftwood.checkpoint import EMBEDDED_DRAFT, EMBEDDED_TARGET, default_target_layer_ids, read_config
from draftwood.tree import DraftTree
from tests.verify_service.harness import SteppedRunner, config_of, oracle_tree

PROMPT = list(range(60, 85))


@torch.inference_mode()
def rows_by_hand(token_ids: list[int]) -> torch.Tensor:
    """hidden_norm(fc(concat of hidden_states[id + 1])), float64 from the concatenation on."""
    model = Qwen3_5ForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32).eval()
    hidden = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    config, tensors = read_config(EMBEDDED_DRAFT), load_file(EMBEDDED_DRAFT / "model.safetensors")
    taps = torch.cat([hidden[i + 1][0] for i in config["dflash_config"]["target_layer_ids"]], -1).double()
    rows = taps @ tensors["fc.weight"].double().T
    rows = rows / (rows.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()
    return rows * tensors["hidden_norm.weight"].double()


def test_rows_are_the_taps_of_the_right_layers_behind_accepted_trees() -> None:
    torch.set_num_threads(1)
    bench = SteppedRunner(config_of("embedded", draft="embedded"))
    rng = random.Random(2)
    plain = bench.begin(PROMPT, 60)
    bench.decode(plain, len(PROMPT) + 30)
    drafted = bench.begin(PROMPT, 60, chunk=11, algorithm="ddtree", tree_budget=31)
    accepted: list[int] = []
    while drafted.base_length < len(PROMPT) + 20:
        known = plain.answer[len(drafted.answer) :]
        tree: DraftTree = oracle_tree(rng, drafted.root, known, 8192, depth=rng.choice((0, 2, 5)), budget=31)
        before = drafted.base_length
        bench.step([drafted], {drafted.sequence_id: tree} if rng.random() < 0.8 else {})
        accepted.append(drafted.base_length - before - 1)
    assert max(accepted) >= 2
    assert 0 in accepted
    tokens = [*PROMPT, *drafted.answer][: drafted.base_length]
    got, wanted = bench.committed(drafted)["features"].double(), rows_by_hand(tokens)
    assert got.shape == wanted.shape
    errors = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(errors.max()) < 1e-4
    # One layer off is far away, so the bound means something.
    assert float((got - wanted.roll(1, 0)).norm() / wanted.norm()) > 0.1


@pytest.mark.parametrize(
    ("draft_layers", "target_layers", "ids"),
    [(1, 36, (18,)), (2, 8, (1, 5)), (5, 36, (1, 9, 17, 25, 33)), (3, 10, (1, 4, 7))],
)
def test_layer_ids_where_the_checkpoint_gives_none(draft_layers: int, target_layers: int, ids: tuple[int, ...]) -> None:
    assert default_target_layer_ids(draft_layers, target_layers) == ids
