"""What is asked of the engine and what it answers: values without proto types, clocks or tensors."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from draftwood.errors import ContextLengthError, DraftwoodError, InvalidRequestError
from draftwood.sampling import SamplingParams
from draftwood.tree import DraftTree
from verify_service.core.accept import Finish

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


def new_request_id() -> str:
    """A random name."""
    return secrets.token_hex(8)


def new_seed() -> int:
    """A random 64-bit seed."""
    return secrets.randbits(64)


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
    check_prompt_length(length, limits)
    _check("max_new_tokens", request.max_new_tokens, 1, 2**31)
    if length + request.max_new_tokens > limits.max_context:
        raise ContextLengthError(
            f"{length} prompt tokens and max_new_tokens of {request.max_new_tokens} exceed this model's maximum "
            f"context length of {limits.max_context} tokens",
            field="max_new_tokens",
        )
    _check("min_new_tokens", request.min_new_tokens, 0, request.max_new_tokens)
    _check("tree_budget", request.tree_budget, 1, limits.max_tree_budget)
    _check("width_cap", request.width_cap, 1, limits.max_width)
    _check("num_log_probs", request.num_log_probs or 0, 0, MAX_LOG_PROBS)
    _check("num_prompt_log_probs", request.num_prompt_log_probs or 0, 0, MAX_LOG_PROBS)
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


def check_prompt_length(length: int, limits: Limits) -> None:
    """Raises ContextLengthError where nothing is left for an answer."""
    if length + 1 > limits.max_context:
        raise ContextLengthError(
            f"the prompt has {length} tokens; this model's maximum context length is {limits.max_context} tokens, "
            f"at least one of them for the answer",
            field="prompt_token_ids",
        )


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value}, not in [{low}, {high}]", field=name)


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Natural-log probabilities at one position, of the target's own distribution."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds in the stages of one step, for the whole batch."""

    draft: float = 0.0
    tree: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0
    drafter_busy: float = 0.0
    transport: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """One step of one sequence."""

    base_length: int
    tree: DraftTree
    path: tuple[int, ...]
    times: StageTimes
    shadow_path: tuple[int, ...] = ()  # in shadow-linear mode


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is in the caches."""

    prompt_log_probs: tuple[TokenLogProbs, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly committed tokens."""

    token_ids: tuple[int, ...]
    log_probs: tuple[TokenLogProbs, ...] = ()
    trace: Trace | None = None
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class Stats:
    """Figures of one request; times in seconds."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_drafted_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_fallback_steps: int = 0
    num_shadow_accepted: int = 0
    accepted_histogram: list[int] = field(default_factory=list[int])
    drafted_by_depth: list[int] = field(default_factory=list[int])
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    tree_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    commit_s: float = 0.0
    drafter_busy_s: float = 0.0
    transport_s: list[float] = field(default_factory=list[float])

    def add_step(self, tree: DraftTree, num_accepted: int, *, wanted_draft: bool) -> None:
        """Counts one step; `num_accepted` leaves the bonus token out."""
        self.num_steps += 1
        drafted = tree.num_nodes - 1
        if drafted:
            self.num_drafted_steps += 1
            self.num_drafted_tokens += drafted
            _grow(self.drafted_by_depth, tree.max_depth)
            for depth in range(tree.max_depth):
                self.drafted_by_depth[depth] += 1
        elif wanted_draft:
            self.num_fallback_steps += 1
        self.num_accepted_tokens += num_accepted
        _grow(self.accepted_histogram, num_accepted + 1)
        self.accepted_histogram[num_accepted] += 1

    def add_times(self, times: StageTimes, *, drafted: bool) -> None:
        """Adds one step's stage times."""
        self.draft_s += times.draft
        self.tree_s += times.tree
        self.verify_s += times.verify
        self.accept_s += times.accept
        self.commit_s += times.commit
        self.drafter_busy_s += times.drafter_busy
        if drafted:
            self.transport_s.append(times.transport)


def _grow(values: list[int], length: int) -> None:
    values.extend([0] * (length - len(values)))


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer."""

    reason: Finish
    stop_token_id: int | None
    stats: Stats


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error."""

    error: DraftwoodError


Event = Started | Tokens | Finished | Failed
