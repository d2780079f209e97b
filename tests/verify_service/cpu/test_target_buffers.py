"""Passes of all shapes share the memory of their commit inputs, and views are kept only for the shapes in use."""

from __future__ import annotations

from pathlib import Path

from draftwood.config import VerifyConfig
from tests.verify_service.models import save_tiny
from verify_service.build import build
from verify_service.cpu.runner import PassRunner
from verify_service.cpu.target import MAX_SHAPES


def test_buffers_do_not_grow_with_the_shapes_seen(tmp_path: Path) -> None:
    save_tiny("qwen3_5_text", tmp_path)
    service = build(VerifyConfig(target=str(tmp_path), draft="none", dtype="float32", compile=False, threads=1))
    runner = service.engine.runner
    assert isinstance(runner, PassRunner)
    model, pools = runner.model, runner.pools
    usual = model._buffers_for(1, 8, pools)
    place = usual.commit_inputs.keys.data_ptr()
    for nodes in range(1, 33):
        for batch in range(1, 9):
            commit_inputs = model._buffers_for(batch, nodes, pools).commit_inputs
            assert commit_inputs.k.shape[1:3] == (batch, nodes)
            assert commit_inputs.keys.data_ptr() == place, "memory of its own"
            assert model._buffers_for(1, 8, pools) is usual
            assert len(model._buffers) <= MAX_SHAPES
    large = model._buffers_for(64, 64, pools)
    assert model._buffers_for(64, 64, pools) is large
    assert model._buffers_for(1, 8, pools).commit_inputs.keys.data_ptr() == large.commit_inputs.keys.data_ptr()
