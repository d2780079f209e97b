"""Checkpoints whose config.json is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwood.checkpoint import read_config
from draftwood.errors import UnsupportedModelError


@pytest.mark.parametrize("content", [b"{", b"[]", b'"x"', b"null", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_config_that_is_no_object_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"config\.json") as caught:
        read_config(tmp_path)
    assert caught.value.field == "config.json"
