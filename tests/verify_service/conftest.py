"""Draft clients with scripted drafters, which end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.verify_service.fake_drafter import PATIENCE_S, Answer, FakeDrafter, MakeRig, Rig
from verify_service.draft import client as draft_client


@pytest.fixture(autouse=True)
def _no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    for name in ("MIN_BACKOFF_S", "MAX_BACKOFF_S", "HOPELESS_BACKOFF_S"):
        monkeypatch.setattr(draft_client, name, 0.05)


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(
        answer: Answer | None = None,
        *,
        model: dict[str, Any] | None = None,
        timeout_s: float = PATIENCE_S,
        num_rows: int = 64,
    ) -> Rig:
        rigs.append(Rig(FakeDrafter(answer, **(model or {})).start(), timeout_s, num_rows))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.client.stop()
        rig.fake.kill()
        assert not rig.client._thread.is_alive()
