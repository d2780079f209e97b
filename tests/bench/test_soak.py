"""The soak: its parts without services, and a short one with all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.figures.slope import MIN_BLOCKS, Slope, fit
from bench.figures.values import Answer, Configuration, Stats
from bench.run.crowd import Crowd, Tally, hangs_up
from bench.run.trial import Outcome, Plan
from draftwood.errors import InternalError, OverloadedError

PROMPTS = [[1, 2], [3]]
EXPECTED = [tuple(range(100, 212)), tuple(range(200, 312))]


class ScriptedClient:
    """Answers from the truth, but for the calls that the test has other plans for."""

    def __init__(self, plans: dict[int, Exception | int]) -> None:
        self.plans, self.num_calls, self.hang_ups = plans, 0, 0

    async def generate(self, prompt: Sequence[int], way: Configuration, *, max_new: int, sampling: Any) -> Answer:
        plan = self.plans.get(self.num_calls)
        self.num_calls += 1
        if isinstance(plan, Exception):
            raise plan
        tokens = list(EXPECTED[PROMPTS.index(list(prompt))][:max_new])
        if plan is not None:
            tokens[-1] = plan
        return Answer(tuple(tokens), Stats(num_drafted_steps=way.tree_budget))

    async def hang_up(self, prompt: Sequence[int], way: Configuration, *, max_new: int, num_messages: int) -> None:
        self.hang_ups += 1


async def soaked(plans: dict[int, Exception | int], num_calls: int, hang_ups: float = 0.0) -> Tally:
    client: Any = ScriptedClient(plans)
    crowd = Crowd(client, PROMPTS, EXPECTED, hang_ups=hang_ups, seed=0)
    return await crowd.run(1, lambda: client.num_calls + client.hang_ups >= num_calls)


async def test_what_becomes_of_requests_is_told_apart() -> None:
    plans: dict[int, Exception | int] = {
        1: OverloadedError("full", retry_after_s=0.0), 3: OverloadedError("full"), 5: InternalError("broken"), 7: 99,
    }  # fmt: skip
    tally = await soaked(plans, 20)
    assert (tally.total, tally.completed, tally.refused, tally.hung_up) == (20, 17, 1, 0)
    assert tally.lost == ["refused without a retry time: full", "InternalError: broken"]
    assert [d.token_ids[-1] for d in tally.differences] == [99]


async def test_hang_ups_are_never_more_than_their_share() -> None:
    tally = await soaked({}, 99, hang_ups=0.05)
    assert (tally.hung_up, tally.completed) == (4, 95)
    for share in (0.0, 0.05, 0.3, 1.0):
        flags = [hangs_up(n, share) for n in range(1000)]
        assert all(sum(flags[: n + 1]) <= share * (n + 1) for n in range(1000))
        assert sum(flags) == 1000 * share


def outcome(**changes: Any) -> Outcome:
    plan = Plan(clients=1, seconds=1.0, hang_ups=0.0, kill_every_s=0.0, seed=0)
    good: dict[str, Any] = {
        "plan": plan, "tally": Tally(completed=95, hung_up=5), "kills": 1, "close_calls": 2, "failures": [],
        "memory": Slope(per_s=1.0, error=1.0, num_blocks=MIN_BLOCKS), "resident_bytes": (1, 2),
        "left_over": {"pages": 0},
    }  # fmt: skip
    return Outcome(**(good | changes))


def test_the_verdict() -> None:
    assert outcome().findings == []
    bad: list[dict[str, Any]] = [
        {"tally": Tally(completed=94, hung_up=6)},
        {"tally": Tally(completed=99, lost=["InternalError: broken"])},
        {"failures": ["ddtree 7, prompt 1, token 3: 5, not 6"]},
        {"memory": Slope(per_s=3.0, error=1.0, num_blocks=MIN_BLOCKS)},
        {"left_over": {"pages": 3, "queued": 0}},
    ]
    for changes in bad:
        assert len(outcome(**changes).findings) == 1, changes
    assert outcome(memory=Slope(per_s=3.0, error=1.0, num_blocks=MIN_BLOCKS - 1)).findings == []


def test_the_slope_of_a_line_and_of_noise() -> None:
    samples = [(float(t), 1000.0 + 5.0 * t + (40.0 if t % 3 else -40.0)) for t in range(300)]
    slope = fit(samples, since_s=60.0)
    assert slope.num_blocks == 24
    assert slope.per_s == pytest.approx(5.0, abs=3 * slope.error)
    assert not slope.is_flat
    flat = fit([(t, 1000.0 + 5.0 * ((17 * int(t)) % 11)) for t, _ in samples], since_s=60.0)
    assert flat.is_flat
    assert flat.error > 0
    assert fit([(t, 7.0) for t, _ in samples], since_s=60.0) == Slope(per_s=0.0, error=0.0, num_blocks=24)
    assert not fit(samples[:80], since_s=60.0).is_judged


@pytest.mark.timeout(400)
def test_a_short_soak(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            sys.executable, "-m", "draftwood.cli", "bench", "soak", "--clients", "8", "--seconds", "10",
            "--kill-every", "5", "--no-compile", "--json", str(tmp_path / "soak.json"),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    said = json.loads((tmp_path / "soak.json").read_text())
    assert said["findings"] == said["failures"] == said["requests"]["lost"] == []
    assert said["kills"] >= 1
    assert said["requests"]["drafted_steps"] > 0
    assert said["requests"]["fallback_steps"] > 0, "the drafter was never away"
    assert said["requests"]["completed"] >= 8
    assert not any(said["left_over"].values())
    assert "All held." in result.stdout
