"""Chat requests to ids: roles, parts, messages to go on with, and models without a template."""

from __future__ import annotations

from typing import Any

import pytest

from draftwood.config import GatewayConfig
from draftwood.errors import InvalidRequestError
from gateway.api.prompt import encode_chat
from gateway.api.schemas import ChatRequest, parse
from gateway.api.served_model import ServedModel

SPROUT = ServedModel.load(GatewayConfig())


async def encoded(**fields: Any) -> str:
    """What the model gets to read for a chat request."""
    request = parse(ChatRequest, fields)
    ids = await encode_chat(request, SPROUT.template, SPROUT.tokenizer)
    contents = SPROUT.tokenizer.special_contents
    return "".join(contents.get(i) or SPROUT.tokenizer.decode([i]) for i in ids)


async def test_roles_and_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    assert await encoded(messages=messages) == expected


async def test_trailing_assistant_message() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Well,"}]
    opened = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nWell,"
    assert await encoded(messages=messages) == opened + "<|im_end|>\n<|im_start|>assistant\n"
    assert await encoded(messages=messages, add_generation_prompt=False) == opened + "<|im_end|>\n"
    assert await encoded(messages=messages, continue_final_message=True) == opened


async def test_a_long_conversation_leaves_the_event_loop() -> None:
    text = await encoded(messages=[{"role": "user", "content": "word " * 5000}])
    assert text.count("word") == 5000


async def test_a_model_without_template() -> None:
    request = parse(ChatRequest, {"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(InvalidRequestError, match="no chat template"):
        await encode_chat(request, None, SPROUT.tokenizer)
