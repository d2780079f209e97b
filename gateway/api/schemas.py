"""Requests of the OpenAI API, with the extensions that engines share and Draftwood's own.

Unknown fields are ignored, as clients of other servers send them, and can be listed for a warning. Fields that we know
and do not serve are refused, because an answer without them would not be what was asked for. Numeric ranges are checked
where the values are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from draftwood.errors import InvalidRequestError
from draftwood.ranges import check_range
from gateway.api.refusal import MAX_SHOWN, check_count, neutral, refuse, show

MAX_STOP_STRINGS = 16
MAX_CHOICES_PER_PROMPT = 8
MAX_LOG_PROBS = 20
MAX_MESSAGES = 4096

# Fields of other servers that do not change an answer, or only who pays for it and when it comes.
HARMLESS = frozenset(("metadata", "store", "service_tier", "prompt_cache_key", "parallel_tool_calls")) | {
    "request_id",
    "priority",
    "cache_salt",
}

Role = Literal["system", "developer", "user", "assistant", "tool"]


class Schema(BaseModel):
    """Base of all: JSON types are taken as they are, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Schema):
    """Options of a stream."""

    include_usage: bool | None = None


class Message(Schema):
    """One message of a conversation, its content already one string."""

    role: Role
    content: str
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_tool_calls(cls, data: Any) -> Any:
        return refuse(data, {"tool_calls": neutral([]), "function_call": neutral()})

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        """Text parts become one string, joined by newlines as other engines do."""
        if not isinstance(value, list):
            return value
        texts: list[str] = []
        for i, part in enumerate(cast("list[Any]", value)):
            kind: Any = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else part
            text: Any = cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(text, str):
                raise ValueError(f"part {i} is {show(part)}; only text parts are served")
            texts.append(text)
        return "\n".join(texts)


class GenerationRequest(Schema):
    """What chats and completions have in common."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "response_format": neutral({"type": "text"}),
        **dict.fromkeys(("structured_outputs", "json_schema", "grammar", "regex", "ebnf", "stop_regex"), neutral()),
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), neutral()),
        **dict.fromkeys(("prompt_logprobs", "use_beam_search", "allowed_token_ids"), neutral()),
        **dict.fromkeys(("include_stop_str_in_output", "return_token_ids", "return_tokens_as_token_ids"), neutral()),
        **dict.fromkeys(("truncate_prompt_tokens", "prompt_embeds", "thinking_token_budget"), neutral()),
        **dict.fromkeys(("bad_words", "logits_processors"), neutral([])),
        **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (None, True)),
        **dict.fromkeys(("length_penalty", "typical_p", "tfs"), (None, 1)),
        **dict.fromkeys(("top_a", "mirostat", "mirostat_mode", "xtc_probability", "dry_multiplier"), (None, 0)),
        **dict.fromkeys(("no_repeat_ngram_size", "dynatemp_range", "smoothing_factor"), (None, 0)),
    }

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    algorithm: Literal["none", "dflash", "ddtree"] | None = None
    tree_budget: int | None = None
    tree_width_cap: int | None = None
    tree_spine: bool | None = None
    user: Any = None  # whom the request belongs to; what is no string says nothing, and neither changes the answer
    safety_identifier: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        return refuse(data, cls.unsupported)

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, value: Any) -> Any:
        check_count("stop", value, MAX_STOP_STRINGS)
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_range("n", self.n, 1, MAX_CHOICES_PER_PROMPT)
        check_range("max_tokens", self.max_tokens, 1)
        check_range("min_tokens", self.min_tokens, 0)
        check_range("seed", self.seed, -(2**63), 2**64 - 1)
        if "" in (self.stop or ()):
            raise InvalidRequestError(f"stop is {show(self.stop)}; a stop string cannot be empty", field="stop")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true", field="stream_options")
        return self

    @classmethod
    def unknown_fields(cls, body: Mapping[str, Any]) -> set[str]:
        """Names of fields that this schema ignores without knowing them."""
        return body.keys() - cls.model_fields.keys() - cls.unsupported.keys() - HARMLESS

    @property
    def end_user(self) -> str:
        """Whom the request belongs to; empty where it does not say."""
        return next((name for name in (self.user, self.safety_identifier) if isinstance(name, str)), "")

    @property
    def num_log_probs(self) -> int | None:
        """How many likeliest tokens are wanted beside the log-probability of each token; None: nothing."""
        return None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.unsupported | {
        "tools": neutral([]),
        "tool_choice": neutral("none", "auto"),
        "functions": neutral([]),
        "function_call": neutral("none", "auto"),
        "modalities": neutral(["text"]),
        "audio": neutral(),
        "prediction": neutral(),
        "web_search_options": neutral(),
        "chat_template": neutral(),
        "echo": neutral(),
        "add_special_tokens": neutral(),
        "documents": neutral([]),
    }

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _limit_messages(cls, value: Any) -> Any:
        check_count("messages", value, MAX_MESSAGES)
        return value

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if not self.messages:
            raise InvalidRequestError("messages is []; at least one is needed", field="messages")
        check_range("max_completion_tokens", self.max_completion_tokens, 1)
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise InvalidRequestError(
                f"max_completion_tokens is {show(both[1])} and max_tokens is {show(both[0])}; give one of them",
                field="max_completion_tokens",
            )
        check_range("top_logprobs", self.top_logprobs, 0, MAX_LOG_PROBS)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                f"top_logprobs is {self.top_logprobs} but logprobs is not true", field="top_logprobs"
            )
        return self

    @property
    def num_log_probs(self) -> int | None:
        """See the base."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt` is checked where it is encoded: its four forms need the vocabulary."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.unsupported | {"suffix": neutral("")}

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        check_range("logprobs", self.logprobs, 0, MAX_LOG_PROBS)
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequestError(f"best_of is {show(self.best_of)}; it is served only equal to n", field="best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError("echo is not served together with logprobs", field="echo")
        return self

    @property
    def num_log_probs(self) -> int | None:
        """See the base."""
        return self.logprobs


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse(schema: type[RequestT], body: Mapping[str, Any]) -> RequestT:
    """The request, or InvalidRequestError naming the first field at fault and its value."""
    try:
        return schema.model_validate(dict(body))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = _path(first["loc"])
        if first["type"] == "missing":
            raise InvalidRequestError(f"{path} is missing", field=path) from None
        if first["type"] == "value_error":  # our own, which shows the value as far as it is wrong
            raise InvalidRequestError(f"{path}: {first['msg'].removeprefix('Value error, ')}", field=path) from None
        raise InvalidRequestError(f"{path} is {show(first['input'])}: {first['msg']}", field=path) from None


def _path(parts: tuple[int | str, ...]) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[: MAX_SHOWN + 1] or "body"  # parts may be keys of any length that a client chose
