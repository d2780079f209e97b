"""`draftwood chat` and `draftwood demo` against a gateway of few words."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from draftwood.cli.chat import ask, summary
from draftwood.cli.demo import Comparison, compare, report
from draftwood.cli.gateway_client import Answer, Question, RestClient, server_sent_events
from draftwood.cli.stack.ports import free_port
from draftwood.errors import InternalError, InvalidRequestError, UnavailableError
from tests.draftwood.cli.fake_gateway import answer, event, fake_gateway

TEXT = "It is [b]good for you :smile:"


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    """What goes to standard output."""
    recorder = Console(record=True, width=100)
    for module in ("chat", "demo"):
        monkeypatch.setattr(f"draftwood.cli.{module}.out", recorder)
    return recorder


async def test_the_answer_is_shown_as_it_is(console: Console, capfd: pytest.CaptureFixture[str]) -> None:
    async with fake_gateway() as (url, bodies):
        got = await ask(
            RestClient(url), Question(text="Why?", system="Be brief.", temperature=0.5, seed=3, max_tokens=9)
        )
    assert got.text == TEXT
    assert got.finish_reason == "stop"
    assert console.export_text() == TEXT + "\n"
    shown = " ".join(capfd.readouterr().err.split())
    assert "41 tokens, 400.0 tokens/s, 10 steps, 4.00 tokens per step, 30 of 70 draft tokens accepted (43%)" in shown
    assert bodies == [
        {
            "model": "sprout",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "seed": 3,
            "max_completion_tokens": 9,
        }
    ]


async def test_what_is_not_given_is_left_to_the_server() -> None:
    body = Question(text="x", algorithm="none", tree_budget=7).body("m")
    assert body["algorithm"] == "none"
    assert body["tree_budget"] == 7
    assert not {"temperature", "seed", "max_completion_tokens"} & body.keys()


async def test_nobody_there() -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}/v1"
    with pytest.raises(UnavailableError, match="no gateway answers"):
        await ask(RestClient(url), Question(text="x"))


@pytest.mark.parametrize("suffix", ["", "/", "/v1/"])
async def test_the_path_may_be_left_out(console: Console, suffix: str) -> None:
    async with fake_gateway() as (url, bodies):
        await ask(RestClient(url.removesuffix("/v1") + suffix), Question(text="Why?"))
    assert len(bodies) == 1


async def test_options_for_services_of_its_own_are_ignored_aloud(capfd: pytest.CaptureFixture[str]) -> None:
    async with fake_gateway() as (url, bodies):
        command = [sys.executable, "-m", "draftwood.cli", "chat", "Why?", "--url", url, "--dtype", "float32"]
        process = await asyncio.create_subprocess_exec(*command)
        assert await process.wait() == 0
    assert f"warning: --dtype ignored: a gateway answers at {url}\n" in capfd.readouterr().err
    assert bodies[0]["max_completion_tokens"] == 256


async def test_a_refusal_is_passed_on() -> None:
    def refuse(_body: dict[str, Any]) -> list[str]:
        return [json.dumps({"error": {"message": "tree_budget is 99, not in [1, 63]"}})]

    async with fake_gateway(refuse) as (url, _):
        with pytest.raises(InvalidRequestError, match=r"answers 400: tree_budget is 99, not in \[1, 63\]"):
            await ask(RestClient(url), Question(text="x"))


async def test_an_error_within_the_stream_is_passed_on(console: Console) -> None:
    async with fake_gateway(lambda body: [*answer(body)[:2], event(error={"message": "went down"})]) as (url, _):
        with pytest.raises(InternalError, match="went down"):
            await ask(RestClient(url), Question(text="x"))


async def test_another_server_is_noticed(console: Console) -> None:
    async with fake_gateway(lambda body: [*answer(body)[:5], "data: [DONE]"]) as (url, _):
        with pytest.raises(InternalError, match="is this a Draftwood gateway"):
            await ask(RestClient(url), Question(text="x"))


async def test_figures_that_are_not_known(console: Console) -> None:
    def brief(body: dict[str, Any]) -> list[str]:
        figures = {"seed": 1, "steps": 0, "tokens_per_step": None, "drafted": None, "accepted": 0}
        figures |= {"fallback_steps": None, "stage_ms": {"draft": None}, "decode_ms": None}
        return [*answer(body)[:5], event(choices=[], usage={"completion_tokens": 1}, draftwood=figures)]

    async with fake_gateway(brief) as (url, _):
        got = await ask(RestClient(url), Question(text="x"))
    assert summary(got.figures) == "1 tokens, 0.0 tokens/s, 0 steps, 0.00 tokens per step, seed 1"


async def test_events() -> None:
    async def lines() -> AsyncIterator[str]:
        for line in ("", ": comment", "event: x", 'data: {"a": 1}', 'data:{"a": 2}', "data: [DONE]", 'data: {"a": 3}'):
            yield line

    assert [found["a"] async for found in server_sent_events(lines())] == [1, 2]


async def test_the_demo_compares_both_ways_in_turn(console: Console) -> None:
    async with fake_gateway() as (url, bodies), RestClient(url) as client:
        comparison = await compare(client, Question(text="Why?", temperature=0.0, tree_budget=7), repeats=3)
    ways = [(body["algorithm"], body["messages"][0]["content"]) for body in bodies]
    warm_up, shown, in_turn = ["ddtree", "none"], ["ddtree"], ["ddtree", "none", "none", "ddtree", "ddtree", "none"]
    assert [way for way, _ in ways] == [*warm_up, *shown, *in_turn]
    assert [text for _, text in ways].count("Why?") == 1 + 2 * 3
    assert comparison.is_identical
    assert comparison.speed_up == 2.0
    assert report(comparison, "float32, compiled") == 0
    text = console.export_text()
    assert TEXT in text
    assert "30 of 70 (43%)" in text
    assert "texts are identical" in text
    assert "2.00 times as fast" in text


async def test_the_demos_ratio_is_that_of_its_columns(console: Console) -> None:
    async with fake_gateway() as (url, _), RestClient(url) as client:
        answers = (await compare(client, Question(text="Why?"), repeats=3)).drafted

    def taking(*decode_ms: float) -> list[Answer]:
        pairs = zip(answers, decode_ms, strict=True)
        return [replace(answer, figures=replace(answer.figures, decode_ms=ms)) for answer, ms in pairs]

    comparison = Comparison(taking(100.0, 200.0, 400.0), taking(900.0, 300.0, 400.0))
    assert report(comparison, "float32") == 0
    text = console.export_text()
    (columns,) = re.findall(r"tokens/s\D+([\d.]+)\D+([\d.]+)", text)
    (said,) = re.findall(r"comes ([\d.]+) times as fast", text)
    assert float(said) == pytest.approx(float(columns[0]) / float(columns[1]), abs=0.01)
    assert said == "2.00"


async def test_the_demo_fails_where_texts_differ(console: Console) -> None:
    async with fake_gateway() as (url, _), RestClient(url) as client:
        comparison = await compare(client, Question(text="Why?"), repeats=1)
    other = Answer("Something else", "stop", comparison.plain[0].figures)
    assert report(Comparison(comparison.drafted, [other]), "float32") == 1
    assert "Something else" in console.export_text()
