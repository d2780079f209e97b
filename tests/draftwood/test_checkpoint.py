"""Checkpoints whose config.json is none, and hub ids that cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from draftwood.checkpoint import read_config, resolve
from draftwood.errors import ConfigError, UnsupportedModelError


@pytest.mark.parametrize("content", [b"{", b"[]", b'"x"', b"null", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_config_that_is_no_object_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"config\.json") as caught:
        read_config(tmp_path)
    assert caught.value.field == "config.json"


def not_found(kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    response: Any = httpx.Response(404, request=httpx.Request("GET", "https://hub.example"))
    return kind("404 Client Error.\n\nRepository Not Found for url", response=response)


@pytest.mark.parametrize(
    ("error", "tried"),
    [
        (LocalEntryNotFoundError("no network"), "is not in the cache CACHE, and https://hub.example cannot be reached"),
        (OfflineModeIsEnabled("offline"), "is not in the cache CACHE, and HF_HUB_OFFLINE forbids to ask the hub"),
        (RepositoryNotFoundError, "https://hub.example has no model of this name for you (HF_TOKEN)"),
        (GatedRepoError, "https://hub.example gives it only to those whose HF_TOKEN was granted access"),
        (HfHubHTTPError, "https://hub.example does not deliver it: 404 Client Error"),
        (OSError(28, "No space left on device"), "does not deliver it: [Errno 28] No space left on device"),
        (ValueError("a\nb"), "does not deliver it: a"),
        (HFValidationError("bad"), "it is no hub id (owner/name)"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__) if not isinstance(value, str) else "",
)
def test_a_hub_id_that_cannot_be_had(error: Any, tried: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> str:
        raise not_found(error) if isinstance(error, type) else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "CACHE")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.example")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", isinstance(error, OfflineModeIsEnabled))
    with pytest.raises(ConfigError) as caught:
        resolve("owner/name", setting="target")
    said = caught.value.message
    assert said.startswith("--target owner/name: no such directory; ")
    assert tried in said
    assert said.endswith(". Give a local directory, or leave the flag out for the embedded model")
    assert "\n" not in said
    assert caught.value.field == "target"
