"""The chat endpoint through the official client: answers, streams, usage, log-probabilities, limits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import Stand
from tests.gateway.fake_verify import EOS, Script

pytestmark = pytest.mark.asyncio(loop_scope="session")

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
TEXT = "The quick brown fox 🦊 jumps; naïve café — 你好."


async def stream_text(stand: Stand, **options: Any) -> tuple[str, str | None]:
    """Text and finish reason of a streamed chat."""
    text, reason = "", None
    stream = await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, stream=True, **options)
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


async def whole_text(stand: Stand, **options: Any) -> tuple[str | None, str]:
    """Text and finish reason of an unstreamed chat."""
    reply = await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, **options)
    return reply.choices[0].message.content, reply.choices[0].finish_reason


async def test_whole_answer(stand: Stand, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    stand.verify.script = Script([*ids, EOS], chunk_sizes=(1, 4))
    reply = await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, seed=7)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert (reply.choices[0].message.role, reply.choices[0].message.content) == ("assistant", TEXT)
    assert reply.choices[0].finish_reason == "stop"
    request = stand.verify.requests[0]
    assert list(request.prompt_token_ids) == tokenizer.encode(
        "<|im_start|>user\nSay something.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (request.sampling.temperature, request.sampling.seed) == (1.0, 7)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(request.prompt_token_ids)
    assert reply.usage.completion_tokens == len(ids) + 1
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_figures(stand: Stand) -> None:
    stand.verify.script = Script([*range(300, 310), EOS], chunk_sizes=(1, 5))  # chunks of 1, 5, 1, 4
    reply = await stand.http.post("/v1/chat/completions", json={"messages": MESSAGES, "seed": -1})
    assert reply.json()["draftwood"] == {
        "seed": 2**64 - 1,
        "steps": 3,
        "tokens_per_step": 3.333,
        "drafted": 21,
        "accepted": 7,
        "fallback_steps": 0,
        "stage_ms": {"draft": 0.4, "tree": 0.05, "verify": 1.5, "accept": 0.06, "commit": 0.07},
        "transport_p50_ms": 0.3,
        "queue_ms": 1.0,
        "prefill_ms": 2.0,
        "decode_ms": 3.0,
    }
    details = reply.json()["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 14}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_figures_up_to_a_stop_string(stand: Stand, tokenizer: Tokenizer, is_streamed: bool) -> None:
    """Of whole steps, the one with the stop string the last; what only the end of the call would tell is null."""
    ids = tokenizer.encode("a b c d e f g h i j k l m n o p")
    assert tokenizer.decode(ids[7:12]) == " h i j k l"  # the third step's run
    stand.verify.script = Script(ids, chunk_sizes=(1, 5), hang_after=True)
    body = {"messages": MESSAGES, "seed": 1, "stop": "h", "stream": is_streamed}
    reply = await stand.http.post("/v1/chat/completions", json=body)
    frames = [line[6:] for line in reply.text.split("\n\n") if line.startswith("data: {")]
    figures = json.loads(frames[-1] if is_streamed else reply.text)["draftwood"]
    assert (figures["steps"], figures["drafted"], figures["accepted"]) == (3, 21, 8)
    assert figures["tokens_per_step"] == 3.667
    assert figures["fallback_steps"] is None
    assert set(figures["stage_ms"].values()) == {None}
    if not is_streamed:
        details = reply.json()["usage"]["completion_tokens_details"]
        assert details == {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 13}


async def test_frames_of_a_stream(stand: Stand, tokenizer: Tokenizer) -> None:
    stand.verify.script = Script([*tokenizer.encode("Hello there"), EOS])
    body = {"model": "sprout", "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    reply = await stand.http.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    frames = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    chunks = [json.loads(frame) for frame in frames[:-1]]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    finish, last = chunks[-2], chunks[-1]
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "stop")
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(tokenizer.encode("Hello there")) + 1
    assert last["draftwood"] == finish["draftwood"]


async def test_no_usage_in_a_stream_unless_asked_for(stand: Stand) -> None:
    reply = await stand.http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True})
    chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
    assert all("usage" not in chunk for chunk in chunks)
    assert "draftwood" in chunks[-1]


@pytest.mark.parametrize("limit", range(1, 8))
async def test_a_limit_inside_a_character(stand: Stand, tokenizer: Tokenizer, limit: int) -> None:
    """Field bug 7."""
    stand.verify.script = Script(tokenizer.encode("🦊🦊 fox"), chunk_sizes=(3,))
    expected = tokenizer.decode(tokenizer.encode("🦊🦊 fox")[:limit]).rstrip("\ufffd")
    assert await whole_text(stand, max_tokens=limit) == (expected, "length")
    assert await stream_text(stand, max_tokens=limit) == (expected, "length")


async def test_a_stop_token_inside_a_run(stand: Stand) -> None:
    """Field bug 1: the tokens behind the stop token must not leak, even if the verify service sends them."""
    stand.verify.script = Script([310, 311, EOS, 320, 321, 322], chunk_sizes=(6,), is_obedient=False)
    reply = await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, max_tokens=5)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3


async def test_more_tokens_than_asked_for(stand: Stand, tokenizer: Tokenizer) -> None:
    stand.verify.script = Script([310, 311, 312, 313], chunk_sizes=(3,), is_obedient=False, hang_after=True)
    assert await whole_text(stand, max_tokens=2) == (tokenizer.decode([310, 311]), "length")
    await stand.verify.cancelled.wait()


async def test_a_stop_string_at_the_start_of_a_run(stand: Stand, tokenizer: Tokenizer) -> None:
    """Field bug 2; the call is cancelled at once."""
    ids = tokenizer.encode("X marks the spot and so on")
    stand.verify.script = Script(ids, chunk_sizes=(8,), hang_after=True)
    reply = await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, stop=["X"])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("", "stop")
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 1
    await stand.verify.cancelled.wait()


async def test_no_part_of_a_stop_string_is_streamed(stand: Stand, tokenizer: Tokenizer) -> None:
    """Field bug 3."""
    ids = tokenizer.encode("... ABCDEFGHIJ and more")
    stand.verify.script = Script(ids, hang_after=True)
    assert await stream_text(stand, stop="DEFGHIJ") == ("... ABC", "stop")
    assert await whole_text(stand, stop=["zzz", "DEFGHIJ"]) == ("... ABC", "stop")


async def test_a_held_back_end_comes_out_at_the_end(stand: Stand, tokenizer: Tokenizer) -> None:
    stand.verify.script = Script([*tokenizer.encode("... ABCDEFGH"), EOS], chunk_sizes=(2,))
    assert await stream_text(stand, stop="DEFGHIJ") == ("... ABCDEFGH", "stop")
    assert await whole_text(stand, stop="DEFGHIJ") == ("... ABCDEFGH", "stop")


async def test_min_tokens_and_ignore_eos(stand: Stand, tokenizer: Tokenizer) -> None:
    stand.verify.script = Script([310, EOS, 311, EOS, 312])
    assert await whole_text(stand, extra_body={"min_tokens": 2}) == (tokenizer.decode([310, 311]), "stop")
    text = tokenizer.decode([310, 311, 312])
    assert await whole_text(stand, max_tokens=5, extra_body={"ignore_eos": True}) == (text, "length")
    assert await whole_text(stand, extra_body={"stop_token_ids": [310]}) == ("", "stop")


async def test_parameters_reach_the_verify_service(stand: Stand) -> None:
    await stand.openai.chat.completions.create(
        model="sprout",
        messages=MESSAGES,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=-2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 3},
        extra_headers={"X-Request-Id": "mine", "traceparent": "00-1-2-01"},
        extra_body={
            "top_k": 4,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "min_tokens": 1,
            "stop_token_ids": [7],
            "ignore_eos": True,
            "algorithm": "dflash",
            "tree_budget": 15,
            "tree_width_cap": 3,
            "tree_spine": True,
            "some_unknown_field": 1,
        },
    )
    request = stand.verify.requests[0]
    sampling = request.sampling
    assert (request.request_id, request.traceparent) == ("mine", "00-1-2-01")
    assert (request.max_new_tokens, request.min_new_tokens, list(request.stop_token_ids)) == (9, 1, [7])
    assert (request.ignore_model_stop, request.algorithm) == (True, 2)
    assert (request.tree_budget, request.width_cap, request.spine) == (15, 3, True)
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.5, 4, 0.25)
    assert sampling.top_p == pytest.approx(0.9)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert sampling.seed == 2**64 - 2
    assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(5, 3.0)]


async def test_absent_parameters_stay_absent(stand: Stand) -> None:
    await whole_text(stand)
    request = stand.verify.requests[0]
    for name in ("tree_budget", "width_cap", "spine", "num_log_probs", "min_new_tokens"):
        assert not request.HasField(name), name
    assert request.algorithm == 0
    assert request.max_new_tokens == 2048 - len(request.prompt_token_ids)


async def test_several_choices(stand: Stand, tokenizer: Tokenizer) -> None:
    stand.verify.script = Script([*tokenizer.encode("Hi"), EOS])
    reply = await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, n=3, seed=1)
    assert [(choice.index, choice.message.content) for choice in reply.choices] == [(0, "Hi"), (1, "Hi"), (2, "Hi")]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3 * (len(tokenizer.encode("Hi")) + 1)
    assert reply.usage.prompt_tokens == len(stand.verify.requests[0].prompt_token_ids)
    seeds = {request.request_id[-1]: request.sampling.seed for request in stand.verify.requests}
    assert seeds["0"] == 1
    assert len(set(seeds.values())) == 3
    stream = await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, n=3, stream=True)
    texts: dict[int, str] = {}
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == {0: "Hi", 1: "Hi", 2: "Hi"}


@pytest.mark.parametrize("stop", [None, "marks"])
async def test_log_probs_join_to_the_text(stand: Stand, tokenizer: Tokenizer, stop: str | None) -> None:
    stand.verify.script = Script([*tokenizer.encode("🦊 fox marks the spot"), EOS], chunk_sizes=(3,))
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "stop": stop}
    reply = await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, **options)
    choice = reply.choices[0]
    assert choice.logprobs is not None
    assert choice.message.content is not None
    entries = choice.logprobs.content or []
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == choice.message.content
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)
    assert entries[0].top_logprobs[1].logprob == -9999.0
    stream = await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, stream=True, **options)
    streamed = [
        entry
        async for chunk in stream
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == entries
