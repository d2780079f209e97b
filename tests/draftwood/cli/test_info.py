"""`draftwood info`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from draftwood.cli import info, main


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of memory, which test_memory.py is about, take two processes that import torch."""
    monkeypatch.setattr(info, "memory_facts", lambda _config: {})  # pyright: ignore[reportUnknownLambdaType]


def test_facts_for_people_and_programs() -> None:
    shown = CliRunner().invoke(main, ["info"])
    assert shown.exit_code == 0, shown.output
    facts = json.loads(CliRunner().invoke(main, ["info", "--json"]).output)
    for section, rows in facts.items():
        assert section in shown.output
        assert all(name in shown.output for name in rows)
    assert facts["versions"]["transformers"].startswith("5.")
    assert isinstance(facts["machine"]["native bfloat16"], bool)
    assert facts["target model"]["mixers"] == {"linear_attention": 6, "full_attention": 2}
    assert facts["target model"]["layers"] == 8
    assert facts["draft model"]["block size"] == 16
    assert facts["draft model"]["taps"] == [1, 4, 6]
    assert facts["defaults: verify"]["--algorithm"] == "ddtree"


OPERATE = Path(__file__).parents[3] / "docs" / "operate.md"
EXAMPLES = re.findall(r"^draftwood (?:info|up) (--target .*)$", OPERATE.read_text().replace("\\\n", ""), re.MULTILINE)


@pytest.mark.parametrize("flags", EXAMPLES)
def test_examples_of_shapes_are_of_shapes_that_are_there(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(OPERATE.parents[1])
    facts = json.loads(
        CliRunner().invoke(main, ["info", *flags.replace("--random-weights", "").split(), "--json"]).output
    )
    assert facts["target model"]["layers"] == 36
    assert len(EXAMPLES) == 2


def test_without_a_draft_model() -> None:
    facts = json.loads(CliRunner().invoke(main, ["info", "--draft", "none", "--json"]).output)
    assert "draft model" not in facts
