"""The draft pass against a plain recomputation, transformers' own DFlash, and the embedded pair's text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draft_service.cache.context_cache import SequenceKey
from draft_service.draft.drafter import Drafter
from draft_service.draft.types import ContextRows, Drafted, SequenceStep
from draftwood.checkpoint import EMBEDDED_DRAFT, EMBEDDED_TARGET, load_tensors, read_config
from draftwood.tree_options import TreeOptions
from tests.draft_service.conftest import MakeDrafter, load_drafter
from tests.draft_service.plain_dflash import MIXED, SLIDING, TINY, plain_logits, random_tensors

FLASH: dict[str, Any] = TINY["dflash_config"]


def rows_of(length: int, hidden: int = 48, seed: int = 0) -> Tensor:
    return torch.randn(length, hidden, generator=torch.Generator().manual_seed(seed))


def logits_of(drafter: Drafter, contexts: list[Tensor], roots: list[int], chunk: int = 5) -> list[Tensor]:
    """Logits of all depths, the contexts brought in chunks, the block passes made together."""
    sequences = []
    with torch.inference_mode():
        for i, rows in enumerate(contexts):
            for start in range(0, len(rows), chunk):
                assert drafter.take(1, i, 1, ContextRows(start, rows[start : start + chunk])) is None
            sequence = drafter.cache.open(SequenceKey(1, i), 1)
            assert sequence is not None
            assert drafter.cache.has_context(sequence, len(rows))
            sequences.append(sequence)
        logits = drafter._trees.logits(roots, sequences, [drafter.config.max_depth] * len(roots))
    drafter.close_stream(1)
    return [x.clone() for x in logits]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"rope_theta": None, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    {"layer_types": SLIDING, "sliding_window": 9},
    {"layer_types": SLIDING, "sliding_window": 4, "is_causal": False},
    {"layer_types": MIXED, "sliding_window": 11},
    {"layer_types": MIXED, "sliding_window": 11, "is_causal": True},
    {"layer_types": MIXED, "sliding_window": 11, "dflash_config": FLASH | {"causal": False}},
    {"is_causal": False, "dflash_config": FLASH | {"causal": True}},
    {"dflash_config": FLASH | {"sample_from_anchor": True}},
    {"dflash_config": FLASH | {"output_multiplier": 0.7, "final_logit_softcapping": 3.0, "input_embedding_scale": 2.5}},
    {"num_key_value_heads": 6, "block_size": 2},
    {"num_key_value_heads": 1, "head_dim": 6, "block_size": 16},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_logits_equal_the_plain_recomputation(make_drafter: MakeDrafter, changes: dict[str, Any]) -> None:
    drafter, draft, target = make_drafter(**changes)
    for length in (0, 1, 3, 8, 9, 10, 33):
        rows = rows_of(length)
        (logits,) = logits_of(drafter, [rows], [17])
        torch.testing.assert_close(logits.double(), plain_logits(draft, target, rows, 17), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", VARIANTS[2:6], ids=str)
def test_batched_equals_alone(make_drafter: MakeDrafter, changes: dict[str, Any]) -> None:
    drafter, _, _ = make_drafter(**changes)
    contexts = [rows_of(length, seed=length) for length in (21, 2, 40)]
    together = logits_of(drafter, contexts, [3, 4, 5])
    for i in range(3):
        (alone,) = logits_of(drafter, [contexts[i]], [3 + i])
        torch.testing.assert_close(together[i], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_windowed_slots_drop_old_rows_only(make_drafter: MakeDrafter, chunk: int) -> None:
    drafter, draft, target = make_drafter(layer_types=SLIDING, sliding_window=9)
    assert drafter.cache.capacity == 18
    rows = rows_of(61)
    (logits,) = logits_of(drafter, [rows], [17], chunk=chunk)
    torch.testing.assert_close(logits.double(), plain_logits(draft, target, rows, 17), atol=2e-4, rtol=1e-4)


def test_draft_window_narrows_full_layers(make_drafter: MakeDrafter, tmp_path: Path) -> None:
    drafter, draft, target = make_drafter({"window": 8})
    assert drafter.config.context_window == 8
    config = json.loads((draft / "config.json").read_text())
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    (narrow / "model.safetensors").symlink_to(draft / "model.safetensors")
    narrow_config = config | {"layer_types": SLIDING, "sliding_window": 8, "is_causal": False}
    (narrow / "config.json").write_text(json.dumps(narrow_config))
    rows = rows_of(30)
    (logits,) = logits_of(drafter, [rows], [17])
    torch.testing.assert_close(logits.double(), plain_logits(narrow, target, rows, 17), atol=2e-4, rtol=1e-4)


def test_checkpoints_with_a_prefix(make_drafter: MakeDrafter) -> None:
    drafter, draft, target = make_drafter()
    rows = rows_of(12)
    (expected,) = logits_of(drafter, [rows], [17])
    save_file({f"model.{k}": v for k, v in random_tensors(TINY).items()}, draft / "model.safetensors")
    (logits,) = logits_of(load_drafter(draft, target), [rows], [17])
    torch.testing.assert_close(logits, expected)


def test_compiled_equals_eager(make_drafter: MakeDrafter) -> None:
    """Traced, without code generation: one graph serves any context length."""
    drafter, _, _ = make_drafter()
    contexts = [rows_of(length) for length in (5, 12, 0, 33, 1, 96)]
    eager = [logits_of(drafter, [rows], [17])[0] for rows in contexts]
    torch._dynamo.reset()

    def alone(*inputs: Any) -> list[Tensor]:
        return [drafter.model.forward(*inputs)]

    drafter._trees._pass._alone = torch.compile(alone, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, expected in zip(contexts, eager, strict=True):
            torch.testing.assert_close(logits_of(drafter, [rows], [17])[0], expected, atol=1e-5, rtol=1e-5)


def test_logits_equal_transformers_own_dflash(tmp_path: Path, make_drafter: MakeDrafter) -> None:
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    changes = {"layer_types": SLIDING, "sliding_window": 64, "is_causal": False, "head_dim": 16}
    drafter, _, target = make_drafter(**changes)
    shared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
              "rms_norm_eps", "max_position_embeddings", "block_size")  # fmt: skip
    model = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{key: TINY[key] for key in shared},
            head_dim=16,
            sliding_window=64,
            mask_token_id=130,
            target_layer_ids=[1, 6],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    weights = random_tensors(TINY | changes)
    model.load_state_dict({names.get(name, name): tensor for name, tensor in weights.items()})
    tables = load_tensors(target, ["model.embed_tokens.weight", "lm_head.weight"])
    taps, ids = rows_of(23, 96), torch.tensor([[17] + [130] * 6])
    with torch.inference_mode():
        embedded = torch.nn.functional.embedding(ids, tables["model.embed_tokens.weight"])
        hidden = model(embedded, taps[None], position_ids=torch.arange(30)[None]).last_hidden_state
        rows = model.encoder(taps)
    (logits,) = logits_of(drafter, [rows], [17])
    torch.testing.assert_close(logits, hidden[0, 1:] @ tables["lm_head.weight"].T, atol=2e-4, rtol=1e-4)


def test_embedded_drafter_knows_its_target(tmp_path: Path) -> None:
    """Chains behind a text that the target wrote itself: about 3.4 tokens per step are accepted, the bonus included."""
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM

    target: Any = Qwen3_5ForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    message = [{"role": "user", "content": "Tell me a story about a big bear and a small mouse."}]
    prompt = tokenizer(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))["input_ids"]
    ids = torch.tensor([prompt])
    projection = load_tensors(EMBEDDED_DRAFT, ["fc.weight", "hidden_norm.weight"])
    taps = read_config(EMBEDDED_DRAFT)["dflash_config"]["target_layer_ids"]
    with torch.inference_mode():
        text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        states = target(text, output_hidden_states=True).hidden_states
        rows = torch.cat([states[i + 1][0] for i in taps], -1) @ projection["fc.weight"].float().T
        rows = torch.nn.functional.rms_norm(rows, rows.shape[-1:], projection["hidden_norm.weight"].float(), 1e-6)
    tokens = text[0].tolist()
    drafter = load_drafter(EMBEDDED_DRAFT, EMBEDDED_TARGET, max_context=256, max_batch=1)
    base, steps, start = len(prompt), 0, 0
    while base < len(tokens) - 16:
        step = SequenceStep(
            1, 1, base, tokens[base], ContextRows(start, rows[start:base]), TreeOptions("dflash", 15, 8)
        )
        (result,) = drafter.step(1, [step], (), lambda: False).results
        assert isinstance(result, Drafted)
        drafted, start = result.tree.token_ids[1:], base
        accepted = 0
        while accepted < 15 and drafted[accepted] == tokens[base + 1 + accepted]:
            accepted += 1
        base, steps = base + accepted + 1, steps + 1
    assert (base - len(prompt)) / steps > 2.5
