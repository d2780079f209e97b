"""What is asked of the engine: values without proto types, clocks or tensors, and what they are checked against."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwood.errors import ContextLengthError, InvalidRequestError
from draftwood.ranges import check_range
from draftwood.sampling import SamplingParams

MAX_LOG_PROBS = 20
MAX_NAME = 256  # characters of what a client calls itself or its request


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is checked against."""

    vocab_size: int
    max_context: int
    max_tree_budget: int
    max_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to decode, every default resolved."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    min_new_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    algorithm: str = "none"
    tree_budget: int = 1
    width_cap: int = 16
    spine: bool = False
    num_log_probs: int | None = None
    num_prompt_log_probs: int | None = None
    trace_steps: bool = False
    shadow_linear: bool = False  # commit the chain, and say what the tree would have won
    traceparent: str = ""  # context that the spans of its steps belong to; empty where it is not traced
    client: str = ""  # whom fair shares go to


def check_request(request: Request, limits: Limits) -> None:
    """Raises InvalidRequestError or ContextLengthError naming the field and the value."""
    if not request.prompt_token_ids:
        raise InvalidRequestError("prompt_token_ids is empty; at least one token is needed", field="prompt_token_ids")
    for i, token in enumerate(request.prompt_token_ids):
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequestError(
                f"prompt_token_ids[{i}] is {token}, not in [0, {limits.vocab_size})", field="prompt_token_ids"
            )
    length = len(request.prompt_token_ids)
    check_range("max_new_tokens", request.max_new_tokens, 1, 2**31)
    if length + request.max_new_tokens > limits.max_context:
        raise ContextLengthError(
            f"{length} prompt tokens and max_new_tokens of {request.max_new_tokens} exceed this model's maximum "
            f"context length of {limits.max_context} tokens",
            field="max_new_tokens",
        )
    check_range("min_new_tokens", request.min_new_tokens, 0, request.max_new_tokens)
    check_range("tree_budget", request.tree_budget, 1, limits.max_tree_budget)
    check_range("width_cap", request.width_cap, 1, limits.max_width)
    check_range("num_log_probs", request.num_log_probs, 0, MAX_LOG_PROBS)
    check_range("num_prompt_log_probs", request.num_prompt_log_probs, 0, MAX_LOG_PROBS)
    for name, text in (("client", request.client), ("request_id", request.request_id)):
        if len(text) > MAX_NAME:
            raise InvalidRequestError(f"{name} has {len(text)} characters, more than {MAX_NAME}", field=name)
    if not request.request_id.isprintable():  # it goes into the log
        raise InvalidRequestError("request_id holds a control character", field="request_id")
    for token in request.stop_token_ids:
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids holds {token}, not in [0, {limits.vocab_size})", field="stop_token_ids"
            )
    if request.min_new_tokens and len(request.stop_token_ids) == limits.vocab_size:
        raise InvalidRequestError(
            f"min_new_tokens is {request.min_new_tokens}, but every token is a stop token, so that none is left for it",
            field="min_new_tokens",
        )
