"""Statistics of benchmarks, the measuring loop, reports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench.decode import configurations
from bench.figures.figures import Sample, acceptance_by_depth, bootstrap_interval, round_ratios, rows, summarise
from bench.figures.plot import write_plot
from bench.figures.values import Answer, Configuration, Stats, Target
from bench.run.experiment import Experiment, Result
from bench.run.measure import Plan, decode_all, enough_rounds, measure
from bench.run.options import write_json
from bench.run.prompts import PromptSet
from bench.run.report import caption, decode_table, print_report, stage_table, sweep_table, to_json
from draftwood.errors import ConfigError
from draftwood.sampling import SamplingParams

NONE, CHAIN, TREE = Configuration("none"), Configuration("dflash", 7), Configuration("ddtree", 15)


def sample(seconds: float, *, num_tokens: int = 101, stats: Stats | None = None) -> Sample:
    stats = stats or Stats(num_steps=num_tokens - 1)
    return Sample(num_answers=1, num_tokens=num_tokens, seconds=seconds, wall_s=2 * seconds, stats=stats)


def test_speed_leaves_the_first_token_of_each_answer_out() -> None:
    assert sample(2.0).tokens_per_s == 50.0
    one = Sample(num_answers=3, num_tokens=33, seconds=1.0, wall_s=1.1, stats=Stats())
    assert one.tokens_per_s == 30.0
    assert one.throughput == pytest.approx(30.0)
    assert sample(0.0, num_tokens=1).tokens_per_s == 0.0


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=12))
def test_the_interval_is_within_the_data(values: list[float]) -> None:
    low, high = bootstrap_interval(values)
    assert min(values) <= low <= high <= max(values)
    assert bootstrap_interval(values) == (low, high), "the same data give the same interval"


def test_the_interval_shrinks_with_more_rounds() -> None:
    few, many = [9.0, 10.0, 11.0], [9.0, 10.0, 11.0] * 20

    def width(values: list[float]) -> float:
        low, high = bootstrap_interval(values)
        return high - low

    assert width(many) < width(few)


def test_ratios_are_taken_within_rounds() -> None:
    slow_round = [sample(1.0), sample(10.0), sample(1.0)]
    faster = [sample(0.5), sample(5.0), sample(0.5)]
    assert round_ratios(faster, slow_round) == [2.0, 2.0, 2.0]


def test_acceptance_by_depth() -> None:
    # Ten steps: 4 accept nothing, 3 accept one, 3 accept two; nine trees reached depth 1, six depth 2.
    stats = Stats(accepted_histogram=(4, 3, 3), drafted_by_depth=(9, 6, 0))
    assert acceptance_by_depth(stats) == (6 / 9, 3 / 6)
    assert acceptance_by_depth(Stats(accepted_histogram=(5,))) == ()


def test_stats_add_up() -> None:
    a = Stats(num_steps=2, verify_us=5, accepted_histogram=(1, 1), transport_p50_us=(3,))
    b = Stats(num_steps=3, verify_us=7, accepted_histogram=(0, 1, 2), transport_p50_us=(4,))
    assert a + b == Stats(num_steps=5, verify_us=12, accepted_histogram=(1, 2, 2), transport_p50_us=(3, 4))


def test_a_row() -> None:
    stats = Stats(
        num_steps=25, num_drafted_steps=25, num_drafted_tokens=375, decode_us=1_000_000, verify_us=500_000,
        accepted_histogram=(5, 20), drafted_by_depth=(25,), transport_p50_us=(400,),
    )  # fmt: skip
    none = [sample(2.0), sample(2.0)]
    row = summarise("ddtree 15", [sample(1.0, stats=stats), sample(1.0, stats=stats)], none=none)
    assert row.tokens_per_s == 100.0
    assert row.ratio_to_none == 2.0
    assert row.ratio_to_linear is None
    assert (row.num_tokens, row.num_steps) == (100, 25)
    assert row.tokens_per_step == 4.0
    assert row.drafted_per_step == 15.0
    assert row.acceptance_by_depth == (0.8,)
    assert row.ms_per_step == 40.0
    assert row.stage_ms["verify"] == 20.0
    assert row.transport_p50_ms == 0.4


def test_linear_is_the_fastest_chain() -> None:
    found = {NONE: [sample(4.0)], CHAIN: [sample(2.0)], Configuration("dflash", 15): [sample(3.0)], TREE: [sample(1.0)]}
    by_name = {row.configuration: row for row in rows(found)}
    assert by_name["ddtree 15"].ratio_to_none == 4.0
    assert by_name["ddtree 15"].ratio_to_linear == 2.0
    assert by_name["none"].ratio_to_none == 1.0


def test_configurations() -> None:
    assert configurations(["none", "dflash", "ddtree"], [7, 15], [7]) == [
        NONE,
        CHAIN,
        Configuration("ddtree", 7),
        TREE,
    ]
    assert configurations(["ddtree", "dflash"], [0, 15], []) == [NONE, TREE]
    with pytest.raises(ConfigError, match="nothing is not among"):
        configurations([], [7], [7])
    assert [c.name for c in (NONE, TREE)] == ["none", "ddtree 15"]


@pytest.mark.parametrize(("rounds", "num_prompts", "expected"), [(None, 24, 5), (None, 3, 7), (None, 1, 20), (1, 1, 1)])
def test_few_prompts_are_repeated_more_often_unless_told(rounds: int | None, num_prompts: int, expected: int) -> None:
    assert enough_rounds(rounds, num_prompts) == expected


async def test_rounds_are_interleaved_and_the_order_rotates() -> None:
    order: list[str] = []

    async def decode(_prompt: Sequence[int], configuration: Configuration) -> Answer:
        order.append(configuration.name)
        return Answer((1, 2, 3), Stats(num_steps=2, decode_us=1000))

    told: list[str] = []
    plan = Plan(prompts=[[1]], configurations=[NONE, CHAIN, TREE], rounds=3)
    samples = await measure(plan, decode, told.append)
    names = ["none", "dflash 7", "ddtree 15"]
    assert order == [*names, *names, *names[1:], names[0], names[2], *names[:2]]
    assert all(len(found) == 3 for found in samples.values())
    assert samples[NONE][0].tokens_per_s == 2000.0
    assert len(told) == 3 * (3 + 1)


async def test_several_at_once_keep_their_order() -> None:
    running = most = 0

    async def decode(prompt: Sequence[int], _configuration: Configuration) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01 / prompt[0])
        running -= 1
        return Answer(tuple(prompt), Stats())

    prompts = [[i] for i in range(1, 8)]
    answers = await decode_all(prompts, NONE, decode, concurrency=3)
    assert [list(answer.token_ids) for answer in answers] == prompts
    assert most == 3


@pytest.fixture
def result() -> Result:
    experiment = Experiment(
        prompts=PromptSet("some.jsonl", ("a", "b")), configurations=(NONE, TREE), rounds=2, max_new=112,
        concurrency=1, sampling=SamplingParams(), with_reference=False, verify=None, stack_values={"dtype": "float32"},
    )  # fmt: skip
    target = Target(
        model_id="sprout", model_type="qwen3_5_text", dtype="float32", tokenizer_hash="", max_tree_budget=63,
        max_batch=8, drafter_status="ready", draft_model_id="sprout-DFlash-b16",
    )  # fmt: skip
    drafted = Stats(num_steps=25, accepted_histogram=(5, 20), drafted_by_depth=(25,), verify_us=5)
    found = {NONE: [sample(2.0), sample(2.2)], TREE: [sample(1.0, stats=drafted), sample(1.1, stats=drafted)]}
    return Result(
        experiment=experiment, target=target, rows=rows(found), peak_memory={"draft": 1 << 20, "verify": 3 << 20}
    )


def test_reports_for_people(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=120, record=True)
    monkeypatch.setattr("bench.run.report.out", console)
    for table in (decode_table(result.rows), sweep_table(result.rows)):
        print_report(result, table)
        text = console.export_text()
        assert "ddtree 15" in text
        assert "2.00" in text
        assert "80%" in text
    assert len(stage_table(result.rows).columns) == 8
    words = caption(result)
    assert "4 MiB together (draft 1, verify 3)" in words
    assert "Peak memory 3 MiB (verify 3)" in caption(replace(result, peak_memory={"verify": 3 << 20}))
    assert "greedy" in words
    assert "answers of 51 tokens" in words


def test_tables_of_fast_models_fit_into_80_columns(result: Result) -> None:
    row = replace(
        result.rows[1], configuration="transformers", tokens_per_s=934.5, tokens_per_s_interval=(900.1, 950.2),
        ratio_to_none_interval=(1.25, 2.75), num_steps=12345, transport_p50_ms=10.25,
    )  # fmt: skip
    console = Console(width=80, record=True)
    for table in (decode_table([row]), sweep_table([row]), stage_table([row])):
        console.print(table)
    assert "…" not in console.export_text()


def test_reports_for_programs(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    write_json(to_json(result), path)
    written = json.loads(path.read_text())
    for key in ("commit", "processor", "cores", "versions", "target", "experiment", "results", "peak_memory_bytes"):
        assert key in written
    assert written["experiment"]["prompts_sha256"] == result.experiment.prompts.digest
    assert written["results"][1]["ratio_to_none"] == 2.0
    assert len(written["results"][1]["rounds_tokens_per_s"]) == 2


def test_plots(result: Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "result.png"
    write_plot(result.rows, path, caption(result))
    assert path.read_bytes().startswith(b"\x89PNG")
