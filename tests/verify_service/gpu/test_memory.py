"""A GPU that is too small is told by the sizes of what it would have to hold, and by what to lower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftwood.config import VerifyConfig
from draftwood.device import placement
from draftwood.errors import ConfigError
from tests.verify_service.models import save_tiny
from verify_service import server as service
from verify_service.build import Service, build
from verify_service.gpu.memory import PassLimits, step_size
from verify_service.gpu.runner import GraphRunner
from verify_service.kernels.reference.kernel_set import PLAIN


def test_out_of_memory_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("qwen3_5_text", tmp_path)

    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Service, "warm_up", fails)
    with pytest.raises(
        ConfigError, match=r"\(weights .* GiB, KV pages .*\); lower --max-batch, --max-context"
    ) as error:
        service.load(VerifyConfig(target=str(tmp_path), draft="none", dtype="float32", threads=1))
    assert error.value.field == "max_batch"


def test_out_of_memory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny("qwen3_5_text", tmp_path)

    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(service, "build", fails)
    assert service.main(["--target", str(tmp_path), "--draft", "none", "--dtype", "float32"]) == 2
    assert capsys.readouterr().err.startswith("error: this GPU's memory does not hold what is asked for (weights ")


def test_the_plan_is_what_is_allocated(tmp_path: Path) -> None:
    save_tiny("qwen3_5_text", tmp_path)
    config = VerifyConfig(target=str(tmp_path), draft="none", dtype="float32", threads=1, compile=False, max_batch=3)
    runner = build(config, kernels=PLAIN).engine.runner
    assert isinstance(runner, GraphRunner)
    wanted = step_size(runner.target.spec, PassLimits(3, 64, 256), torch.float32)
    assert wanted == runner.arena.nbytes + runner.hidden.nbytes + runner.logits.nbytes


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--device is cuda, but torch finds no GPU here") as error:
        placement.pick_device(VerifyConfig(device="cuda"))
    assert error.value.field == "device"
    assert placement.pick_device(VerifyConfig(device="auto")).type == "cpu"


def no(*, including_emulation: bool) -> bool:
    return including_emulation


def test_gpus_without_triton_or_bfloat16(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One line says what is done instead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert placement.pick_device(VerifyConfig()).type == "cuda"
    monkeypatch.setattr(placement, "has_triton", lambda: False)
    assert placement.pick_device(VerifyConfig()).type == "cpu"
    assert placement.pick_device(VerifyConfig(device="cuda")).type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", no)
    assert placement.pick_dtype(VerifyConfig(), torch.device("cuda")) == torch.float16
    assert [r.message.split(",")[0] for r in caplog.records] == [
        "Triton is not installed",
        "this GPU does not multiply bfloat16; weights and activations are float16",
    ]
