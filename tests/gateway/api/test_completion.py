"""The completions endpoint: the four forms of a prompt, echo, log-probabilities."""

from __future__ import annotations

import pytest

from gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import Stand
from tests.gateway.fake_verify import EOS, VOCAB_SIZE, Script

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_text_completion(stand: Stand, tokenizer: Tokenizer) -> None:
    stand.verify.script = Script([*tokenizer.encode(" upon a time"), EOS], chunk_sizes=(2,))
    reply = await stand.openai.completions.create(model="sprout", prompt="Once<|im_end|>")
    assert (reply.object, reply.choices[0].text, reply.choices[0].finish_reason) == (
        "text_completion",
        " upon a time",
        "stop",
    )
    request = stand.verify.requests[0]
    assert list(request.prompt_token_ids) == [*tokenizer.encode("Once"), EOS]  # a template written by hand works here
    assert request.max_new_tokens == 16


async def test_streamed_completion(stand: Stand, tokenizer: Tokenizer) -> None:
    stand.verify.script = Script([*tokenizer.encode(" upon a time"), EOS])
    stream = await stand.openai.completions.create(
        model="sprout", prompt="Once", stream=True, echo=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Once upon a time"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([300, 301], [[300, 301]]),
        ([[300], [301, 302]], [[300], [301, 302]]),
        ([[0], [VOCAB_SIZE - 1]], [[0], [VOCAB_SIZE - 1]]),
        (["a", "b"], [[68], [69]]),
    ],
)
async def test_forms_of_a_prompt(stand: Stand, prompt: list[int], expected: list[list[int]]) -> None:
    stand.verify.script = Script([300, EOS])
    reply = await stand.openai.completions.create(model="sprout", prompt=prompt, n=2)
    assert [choice.index for choice in reply.choices] == list(range(2 * len(expected)))
    requests = sorted(stand.verify.requests, key=lambda request: request.request_id)
    assert [list(request.prompt_token_ids) for request in requests] == [ids for ids in expected for _ in range(2)]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(map(len, expected))


@pytest.mark.parametrize(
    ("prompt", "field", "shown"),
    [
        ("", "prompt", '""'),
        ([], "prompt", "[]"),
        ([""], "prompt[0]", '""'),
        ([[]], "prompt[0]", "[]"),
        (["a", 5], "prompt[1]", "5"),
        ([-1], "prompt[0]", "-1"),
        ([1, VOCAB_SIZE], "prompt[1]", str(VOCAB_SIZE)),
        ([[1], [2, -1]], "prompt[1][1]", "-1"),
        ([1, "a"], "prompt[1]", '"a"'),
        ([True], "prompt[0]", "true"),
        ([1.5], "prompt[0]", "1.5"),
        ([10**30], "prompt[0]", str(10**30)),
        (5, "prompt", "5"),
        (None, "prompt", "null"),
        ({"a": 1}, "prompt", '{"a": 1}'),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_that_are_refused(stand: Stand, prompt: object, field: str, shown: str, stream: bool) -> None:
    """Field bug 10."""
    reply = await stand.http.post("/v1/completions", json={"prompt": prompt, "stream": stream})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert error["message"].startswith(f"{field} is {shown}")
    assert stand.verify.requests == []


async def test_log_probs(stand: Stand, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" upon a time")
    stand.verify.script = Script([*ids, EOS], chunk_sizes=(2,))
    reply = await stand.openai.completions.create(model="sprout", prompt="Once", logprobs=1)
    log_probs = reply.choices[0].logprobs
    assert log_probs is not None
    assert "".join(log_probs.tokens or []) == " upon a time"
    assert log_probs.token_logprobs == pytest.approx([-token_id / 1000 for token_id in ids])
    assert log_probs.text_offset == [0, *(len(tokenizer.decode(ids[:i])) for i in range(1, len(ids)))]
    assert [list(entry) for entry in log_probs.top_logprobs or []] == [[token] for token in log_probs.tokens or []]
