"""The table in docs/models.md is that of the tests, and the tests know every family that is served."""

from __future__ import annotations

import pytest

from tests.repository import models_document
from tests.verify_service.models import FAMILIES
from verify_service.model.spec import SUPPORTED


def test_every_family_that_is_served_is_tested() -> None:
    assert set(FAMILIES) == set(SUPPORTED)


def test_table_is_current() -> None:
    text = models_document.DOCUMENT.read_text(encoding="utf-8")
    assert text == models_document.rewritten(text), "run `python -m tests.repository.models_document`"


def test_table_has_a_row_a_family() -> None:
    rows = models_document.region().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(FAMILIES)
    (row,) = [row for row in rows if "`qwen3_5_text`" in row]
    assert "| Gated DeltaNet, attention |" in row
    assert "| no drafts; chains of 15; trees of 1, 15, 31, 63 |" in row


def test_document_without_the_comments() -> None:
    with pytest.raises(ValueError, match="once and in order"):
        models_document.rewritten("no region")
