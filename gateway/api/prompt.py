"""Prompts to token ids: conversations through the chat template, completion prompts in their four forms."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from draftwood.errors import ContextLengthError, InvalidRequestError
from gateway.api.refusal import show
from gateway.api.schemas import ChatRequest, CompletionRequest, Message
from gateway.generation.verify_client import Target
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer

LONG_TEXT = 16_384  # characters from which on encoding leaves the event loop
MESSAGE_COST = 64  # what a message costs beside its text, in characters
MAX_DEPTH = 32  # of chat_template_kwargs
MAX_PROMPTS = 128


async def encode_chat(request: ChatRequest, template: ChatTemplate | None, tokenizer: Tokenizer) -> list[int]:
    """Ids of a conversation. The start token is the template's business; the tokenizer adds none."""
    if template is None:
        raise InvalidRequestError("the model has no chat template; use /v1/completions", field="messages")
    options = dict(request.chat_template_kwargs or {})
    if request.add_generation_prompt is not None:
        options["add_generation_prompt"] = request.add_generation_prompt
    for reserved in ("messages", "tools", "documents"):
        if reserved in options:
            name = f"chat_template_kwargs.{reserved}"
            raise InvalidRequestError(f"{name} is {show(options[reserved])}; it cannot be set", field=name)

    def encode() -> list[int]:
        _check_depth(options)
        messages = [_template_message(message) for message in request.messages]
        text, mark = template.render(messages, options, continue_final=bool(request.continue_final_message))
        return tokenizer.encode_marked(text, mark)

    cost = sum(len(message.content) + len(message.name or "") + MESSAGE_COST for message in request.messages)
    if cost > LONG_TEXT or request.chat_template_kwargs:  # the latter are of any size
        return await asyncio.to_thread(encode)
    return encode()


def _template_message(message: Message) -> dict[str, Any]:
    entry = message.model_dump(exclude_none=True)
    return entry | {"role": "system" if message.role == "developer" else message.role}


def _check_depth(options: dict[str, Any]) -> None:
    """Templates and what prepares values for them recurse; what is nested deeper than any use is refused before."""
    level: list[Any] = [options]
    for _ in range(MAX_DEPTH):
        entries: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                entries += cast("dict[str, Any]", value).values()
            elif isinstance(value, list):
                entries += cast("list[Any]", value)
        level = entries
    if level:
        field = "chat_template_kwargs"
        raise InvalidRequestError(f"{field} is nested deeper than {MAX_DEPTH} levels", field=field)


async def encode_prompts(request: CompletionRequest, tokenizer: Tokenizer, target: Target) -> list[list[int]]:
    """Ids of a prompt given as a string, strings, ids, or lists of ids; of each an entry."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [await _encode_text(prompt, "prompt", request, tokenizer)]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequestError(
            f"prompt is {show(prompt)}, not a string or a list with something in it", field="prompt"
        )
    entries = cast("list[Any]", prompt)
    if not isinstance(entries[0], str | list):
        return [_checked_ids(entries, "prompt", target)]
    if len(entries) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt has {len(entries)} entries, more than {MAX_PROMPTS}", field="prompt")
    prompts: list[list[int]] = []
    for i, entry in enumerate(entries):
        name = f"prompt[{i}]"
        if isinstance(entry, str):
            prompts.append(await _encode_text(entry, name, request, tokenizer))
        elif isinstance(entry, list):
            prompts.append(_checked_ids(cast("list[Any]", entry), name, target))
        else:
            raise InvalidRequestError(f"{name} is {show(entry)}, not a string or a list of token ids", field=name)
    return prompts


async def _encode_text(text: str, name: str, request: CompletionRequest, tokenizer: Tokenizer) -> list[int]:
    add_special_tokens = request.add_special_tokens is not False

    def encode() -> list[int]:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    ids = await asyncio.to_thread(encode) if len(text) > LONG_TEXT else encode()
    if not text or not ids:
        raise InvalidRequestError(f"{name} is {show(text)}; a prompt needs at least one token", field=name)
    return ids


def _checked_ids(ids: list[Any], name: str, target: Target) -> list[int]:
    if not ids:
        raise InvalidRequestError(f"{name} is []; a prompt needs at least one token", field=name)
    room(ids, name, target)  # first, so that the ids looked at are few
    for i, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise InvalidRequestError(f"{name}[{i}] is {show(token_id)}, not a token id", field=f"{name}[{i}]")
        if not 0 <= token_id < target.vocab_size:
            raise InvalidRequestError(
                f"{name}[{i}] is {show(token_id)}, not a token id in [0, {target.vocab_size})", field=f"{name}[{i}]"
            )
    return cast("list[int]", ids)


def room(prompt: list[Any], name: str, target: Target) -> int:
    """Tokens that fit behind a prompt; at least one, else ContextLengthError."""
    left = target.max_context - len(prompt)
    if left < 1:
        raise ContextLengthError(
            f"This model's maximum context length is {target.max_context} tokens, but {name} has {len(prompt)} tokens "
            f"and an answer needs at least one.",
            field=name,
        )
    return left
