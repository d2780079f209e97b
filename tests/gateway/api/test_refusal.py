"""What is refused, before any stream starts, with the field and the value named; and what the HTTP layer refuses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from draftwood.errors import ContextLengthError, InvalidRequestError, OverloadedError, UnavailableError
from tests.gateway.conftest import Stand
from tests.gateway.fake_verify import MAX_CONTEXT, Script

pytestmark = pytest.mark.asyncio(loop_scope="session")

MESSAGES: Any = [{"role": "user", "content": "Say something."}]


def nested(depth: int) -> dict[str, Any]:
    """Objects in objects."""
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "[]"),
    ({"messages": "hi"}, "messages", '"hi"'),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", '"wizard"'),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "null"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "image_url"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "tool_calls", "[{}]"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": 101}, "temperature", "101"),
    ({"temperature": "warm"}, "temperature", '"warm"'),
    ({"temperature": True}, "temperature", "true"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_p": 1.1}, "top_p", "1.1"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"min_p": 2}, "min_p", "2"),
    ({"presence_penalty": 2.5}, "presence_penalty", "2.5"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "-2.5"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"seed": 2**64}, "seed", str(2**64)),
    ({"seed": 1.5}, "seed", "1.5"),
    ({"logit_bias": {"8192": 1}}, "logit_bias", '"8192"'),
    ({"logit_bias": {"-1": 1}}, "logit_bias", '"-1"'),
    ({"logit_bias": {"x": 1}}, "logit_bias", '"x"'),
    ({"logit_bias": {"1": 101}}, "logit_bias", "101"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": "5"}, "max_tokens", '"5"'),
    ({"max_completion_tokens": -5}, "max_completion_tokens", "-5"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "6"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "5"),
    ({"n": 0}, "n", "0"),
    ({"n": 9}, "n", "9"),
    ({"stop": ""}, "stop", '[""]'),
    ({"stop": ["a", ""]}, "stop", '["a", ""]'),
    ({"stop": ["a"] * 17}, "stop", "17"),
    ({"stop": 5}, "stop", "5"),
    ({"stop_token_ids": [8192]}, "stop_token_ids[0]", "8192"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "-1"),
    ({"algorithm": "magic"}, "algorithm", '"magic"'),
    ({"tree_budget": 0}, "tree_budget", "0"),
    ({"tree_budget": 64}, "tree_budget", "64"),
    ({"tree_width_cap": 65}, "tree_width_cap", "65"),
    ({"tree_spine": "yes"}, "tree_spine", '"yes"'),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
    ({"top_logprobs": 2}, "top_logprobs", "2"),
    ({"tools": [{"type": "function"}]}, "tools", "function"),
    ({"tool_choice": "required"}, "tool_choice", '"required"'),
    ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
    ({"guided_regex": "a*"}, "guided_regex", '"a*"'),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "[]"),
    ({"chat_template_kwargs": nested(500)}, "chat_template_kwargs", "32"),
    ({"messages": [{"role": "user", "content": ""}] * 4097}, "messages", "4097"),
    ({"stop_token_ids": [1] * 8193}, "stop_token_ids", "8193"),
    ({"top_k": 10**400}, "top_k", "1000"),
    ({"max_tokens": 5, "max_completion_tokens": 10**400}, "max_completion_tokens", "1000"),
    ({"temperature": 10**400}, "temperature", "1000"),
    ({"allowed_token_ids": [5]}, "allowed_token_ids", "[5]"),
    ({"bad_words": ["a"]}, "bad_words", '["a"]'),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "5"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "true"),
    ({"return_token_ids": True}, "return_token_ids", "true"),
    ({"prompt_logprobs": 0}, "prompt_logprobs", "0"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "false"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "false"),
    ({"length_penalty": 1.5}, "length_penalty", "1.5"),
    ({"top_a": 0.2}, "top_a", "0.2"),
    ({"documents": [{"text": None}]}, "documents", '[{"text": null}]'),
]

NEUTRAL: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "stop": None, "logit_bias": {}},
    {"temperature": None, "seed": None, "n": None, "stream": None, "stream_options": None, "top_k": -1},
    {"skip_special_tokens": True, "length_penalty": 1.0, "top_a": 0, "bad_words": [], "prompt_logprobs": None},
    {"include_stop_str_in_output": False, "chat_template_kwargs": nested(20), "max_completion_tokens": 10**400},
    {"max_tokens": 5, "max_completion_tokens": 5, "stop": [], "user": "me", "metadata": {}, "no_such_field": {}},
]


@pytest.mark.parametrize(("fields", "field", "shown"), REFUSED, ids=lambda value: str(value)[:40])
async def test_bad_fields(stand: Stand, fields: dict[str, Any], field: str, shown: str) -> None:
    for stream in (False, True):
        reply = await stand.http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": stream} | fields)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error"), error
        assert field.split("[")[0] in error["message"]
        assert shown in error["message"]
        assert len(error["message"]) < 250
    assert stand.verify.requests == []


@pytest.mark.parametrize("fields", NEUTRAL, ids=range(len(NEUTRAL)))
async def test_fields_that_ask_for_nothing(stand: Stand, fields: dict[str, Any]) -> None:
    reply = await stand.http.post("/v1/chat/completions", json={"messages": MESSAGES} | fields)
    assert reply.status_code == 200, reply.text


async def test_a_part_that_is_not_served_is_shown_once(stand: Stand) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
    reply = await stand.http.post("/v1/chat/completions", json=body)
    expected = 'messages[0].content: part 0 is {"type": "image_url"}; only text parts are served'
    assert reply.json()["error"]["message"] == expected


async def test_a_long_name_is_shortened(stand: Stand) -> None:
    for fields in ({"model": "m" * 9999}, {"logit_bias": {"k" * 9999: "x"}}):
        reply = await stand.http.post("/v1/chat/completions", json={"messages": MESSAGES} | fields)
        assert 400 <= reply.status_code < 500
        assert len(reply.text) < 500


async def test_an_unknown_field_is_warned_of_once(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        body = {"messages": MESSAGES, "temprature": 1, "user": "me"}
        assert (await stand.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.name == "gateway.api.refusal"] == [
        'the request field "temprature" is not known and is ignored'
    ]


async def test_stream_options_without_stream(stand: Stand) -> None:
    body = {"messages": MESSAGES, "stream_options": {"include_usage": True}}
    reply = await stand.http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream_options")


async def test_messages_missing(stand: Stand) -> None:
    reply = await stand.http.post("/v1/chat/completions", json={"model": "sprout"})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "messages is missing"


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_longer_than_the_context(stand: Stand, stream: bool) -> None:
    """Field bug 11."""
    with pytest.raises(openai.BadRequestError) as caught:
        await stand.openai.completions.create(model="sprout", prompt=[300] * MAX_CONTEXT, stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert f"{MAX_CONTEXT} tokens" in caught.value.message
    messages: Any = [{"role": "user", "content": "word " * MAX_CONTEXT}]
    with pytest.raises(openai.BadRequestError) as caught:
        await stand.openai.chat.completions.create(model="sprout", messages=messages, stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_a_prompt_that_leaves_one_token(stand: Stand) -> None:
    await stand.openai.completions.create(model="sprout", prompt=[300] * (MAX_CONTEXT - 1), max_tokens=4000)
    assert stand.verify.requests[0].max_new_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_model(stand: Stand, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await stand.openai.chat.completions.create(model="gpt-9", messages=MESSAGES, stream=stream)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_overload(stand: Stand, stream: bool) -> None:
    stand.verify.script = Script(error_at_start=OverloadedError("the queue is full", retry_after_s=2.5))
    with pytest.raises(openai.RateLimitError) as caught:
        await stand.openai.chat.completions.create(model="sprout", messages=MESSAGES, stream=stream)
    headers = caught.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"], headers["x-should-retry"]) == ("3", "2500", "true")
    assert caught.value.code == "overloaded"


async def test_a_retry_succeeds(stand: Stand) -> None:
    """The official client waits as it is told and comes back."""
    stand.verify.script = Script(error_at_start=OverloadedError("the queue is full", retry_after_s=0.01))
    client = stand.openai.with_options(max_retries=1)
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model="sprout", messages=MESSAGES)
    assert len(stand.verify.requests) == 2


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (InvalidRequestError("max_new_tokens is odd", field="max_new_tokens"), 400, "invalid_request", "max_tokens"),
        (ContextLengthError("too long", field="prompt"), 400, "context_length_exceeded", "prompt"),
        (UnavailableError("draining", retry_after_s=3), 503, "unavailable", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_verify_service(
    stand: Stand, error: Any, status: int, code: str, param: str | None, stream: bool
) -> None:
    stand.verify.script = Script(error_at_start=error)
    reply = await stand.http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": stream})
    assert (reply.status_code, reply.json()["error"]["code"], reply.json()["error"]["param"]) == (status, code, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"\xff", b'{"a": NaN}', b'{"a": "\\ud800"}', b"[" * 50_000, b"1" * 5000],
    ids=lambda body: str(body[:12]),
)
async def test_bodies_that_are_no_json_object(stand: Stand, body: bytes) -> None:
    reply = await stand.http.post("/v1/chat/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"\xed\xa0\x80","max_tokens":2}',
        b'{"prompt":"\\ud800","max_tokens":2}',
        '{"prompt":"a"}'.encode("utf-16"),
    ],
    ids=["raw", "escaped", "utf-16"],
)
async def test_bodies_that_are_not_unicode(stand: Stand, body: bytes) -> None:
    reply = await stand.http.post("/v1/completions", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("the body is not valid Unicode: ")


async def test_a_byte_order_mark_is_no_matter(stand: Stand) -> None:
    reply = await stand.http.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt":"a"}')
    assert reply.status_code == 200


async def test_body_too_large(stand: Stand) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 1_000_000}]}).encode()
    reply = await stand.http.post("/v1/chat/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v1/chat/completions", 405, "/v1/chat/completions takes POST, not GET"),
        ("POST", "/v1/models", 405, "/v1/models takes GET, HEAD, not POST"),
        (
            "POST",
            "/v1/embeddings",
            404,
            'nothing is served at "/v1/embeddings"; there are /v1/chat/completions, /v1/comp',
        ),
        ("GET", "/", 404, 'nothing is served at "/"; there are /v1/chat/completions, /v1/completions, /v1/models, '),
    ],
)
async def test_wrong_routes(stand: Stand, method: str, path: str, status: int, said: str) -> None:
    reply = await stand.http.request(method, path)
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, "invalid_request_error")
    assert reply.json()["error"]["message"].startswith(said)
    assert reply.headers["x-request-id"]
