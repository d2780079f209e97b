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
    target = runner.target
    usual = target._buffers_for(1, 8)
    place = usual.commit_inputs.keys.data_ptr()
    for nodes in range(1, 33):
        for batch in range(1, 9):
            commit_inputs = target._buffers_for(batch, nodes).commit_inputs
            assert commit_inputs.conv.shape[1:3] == (batch, nodes)
            assert commit_inputs.keys.data_ptr() == place, "memory of its own"
            assert target._buffers_for(1, 8) is usual
            assert len(target._buffers) <= MAX_SHAPES
    large = target._buffers_for(64, 64)
    assert target._buffers_for(64, 64) is large
    assert target._buffers_for(1, 8).commit_inputs.keys.data_ptr() == large.commit_inputs.keys.data_ptr()
