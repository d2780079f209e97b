"""Shapes without weights: both services make them from config.json files alone, and serve."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoConfig, Qwen3_5ForCausalLM

from draft_service.model.config import read_drafter_config
from draft_service.model.tensors import random_projection_checksum, random_target_tensors
from draftwood.checkpoint import EMBEDDED_TARGET, tokenizer_hash
from draftwood.random_weights import random_tensor
from draftwood.v1 import sampling_pb2, tree_pb2, verify_pb2, verify_pb2_grpc
from tests.system.processes import ROOT, Process
from verify_service.model.features import load_projector
from verify_service.model.loading import load_target, random_target
from verify_service.model.spec import SUPPORTED, read_spec, text_config

SHAPES = ROOT / "benchmarks" / "shapes"
CPU, META = torch.device("cpu"), torch.device("meta")
# Published shapes cut down to what a test can hold.
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HYBRID: dict[str, Any] = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
DRAFT: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "block_size": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "dflash_config": {"mask_token_id": 319, "target_layer_ids": [0, 2]},
}


def write_tiny(folder: Path, *, is_tied: bool = False) -> tuple[Path, Path]:
    """Directories of a hybrid target and its drafter, with nothing but config.json."""
    target, draft = folder / "target", folder / "draft"
    for directory in (target, draft):
        directory.mkdir()
    config = json.loads((SHAPES / "Qwen3.6-27B" / "config.json").read_text())
    text = config["text_config"] | TINY | HYBRID | {"tie_word_embeddings": is_tied}
    text |= {"layer_types": text["layer_types"][:4]}
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1]}
    (target / "config.json").write_text(json.dumps(config | {"text_config": text, "tie_word_embeddings": is_tied}))
    config = json.loads((SHAPES / "Qwen3.6-27B-DFlash" / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | TINY | DRAFT))
    return target, draft


@pytest.mark.parametrize("name", ["Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3-8B"])
def test_shipped_targets_are_served_families(name: str) -> None:
    config = text_config(AutoConfig.from_pretrained(SHAPES / name))
    assert config.model_type in SUPPORTED
    assert read_spec(config, ()).num_layers == config.num_hidden_layers


@pytest.mark.parametrize("target", ["Qwen3.6-27B", "Qwen3-8B"])
def test_shipped_pairs_belong_together(target: str) -> None:
    draft = next(path for path in SHAPES.iterdir() if path.name.startswith(f"{target}-DFlash"))
    borrowed = random_target_tensors(SHAPES / target, read_drafter_config(draft), torch.bfloat16, META)
    assert borrowed.head.shape == borrowed.embedding.shape


def test_a_tensor_is_its_names_own() -> None:
    a, b, other = (random_tensor(name, (40, 50), torch.float32, CPU) for name in ("a.weight", "a.weight", "b.weight"))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert float(a.std()) == pytest.approx(50**-0.5, rel=0.1)


@pytest.mark.parametrize("is_tied", [False, True])
def test_services_make_the_same_tensors(tmp_path: Path, is_tied: bool) -> None:
    target, draft = write_tiny(tmp_path, is_tied=is_tied)
    model, spec = load_target(target, torch.float32, CPU, random_weights=True)
    config = read_drafter_config(draft)
    borrowed = random_target_tensors(target, config, torch.float32, CPU)
    assert torch.equal(model.lm_head.weight, borrowed.head)
    assert torch.equal(model.get_input_embeddings().weight, borrowed.embedding)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == is_tied
    projector = load_projector(draft, spec, torch.float32, CPU, random_weights=True)
    assert projector.checksum == random_projection_checksum(config)


def test_parameters_are_made_once_in_the_served_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of a parameter's size is allocated: a large model would not fit twice."""
    target, _ = write_tiny(tmp_path)
    config = text_config(AutoConfig.from_pretrained(target))
    drawn: list[int] = []

    def counted(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, **more: Any) -> Any:
        out = random_tensor(name, shape, dtype, device, **more)
        drawn.append(out.nbytes)
        return out

    monkeypatch.setattr("verify_service.model.loading.random_tensor", counted)
    loader = Qwen3_5ForCausalLM
    model = random_target(loader, config, torch.bfloat16, CPU)
    assert sum(drawn) == sum(p.nbytes for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_pair_without_weights_is_served(tmp_path: Path) -> None:
    target, draft = write_tiny(tmp_path)
    models = ["--target", str(target), "--draft", str(draft), "--random-weights", "--port", "0"]
    drafter = Process("draft_service", models, tmp_path / "draft.log")
    verifier = None
    try:
        args = [*models, "--drafter", drafter.until_ready().address, "--draft-timeout-ms", "30000"]
        verifier = Process("verify_service", args, tmp_path / "verify.log").until_ready()
        with grpc.insecure_channel(verifier.address) as channel:
            stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
            while not stub.GetLoad(verify_pb2.GetLoadRequest(), timeout=30).drafter_status.startswith("ready"):
                pass
            facts = stub.GetTargetModel(verify_pb2.GetTargetModelRequest(), timeout=30).model
            assert facts.tokenizer_hash == tokenizer_hash(EMBEDDED_TARGET)  # it stands in
            request = verify_pb2.GenerateRequest(
                prompt_token_ids=range(10, 30),
                max_new_tokens=12,
                sampling=sampling_pb2.SamplingParams(temperature=1.0, seed=3),
                algorithm=tree_pb2.ALGORITHM_DDTREE,
            )
            replies = list(stub.Generate(request, timeout=100))
            stats = replies[-1].finished.stats
            assert (stats.num_generated_tokens, stats.num_drafted_tokens > 0) == (12, True)
    finally:
        for process in (drafter, verifier):
            if process is not None:
                process.stop()
