"""Projections from step times and acceptance profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.figures.projection import SHIPPED_PROFILE, AcceptanceProfile, StepTimes, project
from draftwood.cli import main
from draftwood.errors import InvalidRequestError

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
STEPS: dict[str, Any] = {
    "shape": "toy",
    "gpu": "a GPU",
    "idle_ms": 0.5,
    "rows": [
        {"batch": b, "nodes": n, "context": 1024, "step": ms, "products": 1.0}
        for b, n, ms in ((1, 1, 9.5), (1, 16, 11.5), (1, 32, 13.5), (4, 1, 19.5), (4, 16, 23.5))
    ],
    "draft": [{"batch": 1, "pass_ms": 2.0, "transport_ms": 1.0}],
}
PROFILE: dict[str, Any] = {"name": "p", "source": "s", "chain": [0.5, 0.25, 0.25], "tree": {"3": 2.5, "31": 3.4}}


def write(folder: Path, data: Any, name: str) -> Path:
    (folder / name).write_text(json.dumps(data))
    return folder / name


def test_speeds_follow_from_the_formula(tmp_path: Path) -> None:
    times = StepTimes.read(write(tmp_path, STEPS, "steps.json"))
    profile = AcceptanceProfile.read(write(tmp_path, PROFILE, "profile.json"))
    rows = project(times, profile, [2, 3, 7], draft=2.0, transport=1.0)
    found = {(row.batch, row.configuration): row for row in rows}
    assert [key for key in found if key[0] == 1] == [
        (1, "none"), (1, "chain 2"), (1, "chain 3"), (1, "tree 3"), (1, "tree 31"),
    ]  # fmt: skip
    assert found[1, "none"].tokens_per_s == pytest.approx(1000 / 10)
    assert found[1, "chain 2"].nodes == 16, "padded to what was measured"
    assert found[1, "chain 2"].tokens_per_s == pytest.approx(1.75 * 1000 / 15)
    assert found[1, "tree 31"].ratio_to_none == pytest.approx(3.4 * 10 / 17)
    assert found[4, "tree 3"].tokens_per_s == pytest.approx(4 * 2.5 * 1000 / 27)
    assert (4, "tree 31") not in found, "nothing was measured that holds it"


def test_a_draft_pass_must_come_from_somewhere(tmp_path: Path) -> None:
    times = StepTimes.read(write(tmp_path, {**STEPS, "draft": []}, "steps.json"))
    profile = AcceptanceProfile("p", "s", (0.5,), {})
    with pytest.raises(InvalidRequestError, match=r"--draft-ms"):
        project(times, profile, [1], draft=None, transport=None)
    rows = [{"batch": 4, "with_7_new_rows_ms": ms} for ms in (1.0, 3.0, 2.0)]
    drafted = times.with_draft(write(tmp_path, {"rows": rows}, "draft.json"))
    found = {(row.batch, row.configuration): row for row in project(drafted, profile, [1], draft=None, transport=0.5)}
    assert set(found) == {(1, "none"), (4, "none"), (4, "chain 1")}
    assert found[4, "chain 1"].ms_per_step == pytest.approx(23.5 + 0.5 + 3.0 + 0.5)


@pytest.mark.parametrize("wrong", ["not json", "[]", '{"shape": "x"}', '{"shape": "x", "gpu": "y", "rows": [{}]}'])
def test_wrong_step_times_are_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "steps.json").write_text(wrong)
    with pytest.raises(InvalidRequestError, match=r"steps\.json"):
        StepTimes.read(tmp_path / "steps.json")


def test_the_shipped_profile_is_what_was_measured() -> None:
    data = json.loads((RESULTS / "acceptance" / "heldout_48-float32.json").read_text())
    measured = AcceptanceProfile.of_results(data, "sprout-heldout-48")
    assert json.loads(SHIPPED_PROFILE.read_text()) == measured.to_json()
    assert AcceptanceProfile.read(SHIPPED_PROFILE) == measured
    chain = next(row for row in data["results"] if row["configuration"] == "dflash 15")
    assert measured.chain_tokens(15) == pytest.approx(chain["tokens_per_step"], abs=0.02)


def test_results_are_labelled(tmp_path: Path) -> None:
    steps = str(write(tmp_path, STEPS, "steps.json"))
    table = CliRunner().invoke(main, ["bench", "project", steps, "--draft-ms", "2"])
    assert table.exit_code == 0, table.output
    assert "Projection, not a measurement" in table.output
    assert "tree 15" in table.output
    printed = CliRunner().invoke(main, ["bench", "project", steps, "--draft-ms", "2", "--json"])
    data = json.loads(printed.output)
    assert data["projection"] is True
    assert "sprout" in data["label"]
    steps = str(write(tmp_path, {**STEPS, "draft": []}, "steps.json"))
    refused = CliRunner().invoke(main, ["bench", "project", steps])
    assert refused.exit_code != 0
    assert "--draft-ms" in refused.output
