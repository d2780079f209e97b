"""Buffers of passes are kept for the shapes in use, and not for every shape that ever was."""

from __future__ import annotations

from pathlib import Path

from draftwood.config import VerifyConfig
from tests.verify_service.models import save_tiny
from verify_service.pass_decoder import PassDecoder
from verify_service.service import build
from verify_service.target.model import MAX_BUFFERED_NODES


def test_buffers_do_not_grow_with_the_shapes_seen(tmp_path: Path) -> None:
    save_tiny("qwen3_5_text", tmp_path)
    service = build(VerifyConfig(target=str(tmp_path), draft="none", dtype="float32", compile=False, threads=1))
    decoder = service.engine.decoder
    assert isinstance(decoder, PassDecoder)
    model, pools = decoder.model, decoder.pools
    usual = model._buffers_for(1, 8, pools)
    for nodes in range(1, 65):
        for batch in range(1, 9):
            model._buffers_for(batch, nodes, pools)
            assert model._buffers_for(1, 8, pools) is usual
            assert sum(b * n for b, n in model._buffers) <= MAX_BUFFERED_NODES
    large = model._buffers_for(64, 64, pools)
    assert model._buffers_for(64, 64, pools) is large
