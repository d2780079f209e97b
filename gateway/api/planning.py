"""Requests to plans: checks what needs the target's limits, and fills in what a request leaves open."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from draftwood.errors import InvalidRequestError
from draftwood.ranges import check_range
from draftwood.sampling import SamplingParams, derived_seed
from draftwood.tree import MAX_WIDTH
from gateway.api.prompt import room
from gateway.api.refusal import check_count, show
from gateway.api.schemas import ChatRequest, CompletionRequest
from gateway.api.served_model import SamplingDefaults
from gateway.generation.answer import Limits
from gateway.generation.plan import Choice, Plan
from gateway.generation.verify_client import GenerateOptions, Target

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; chats go on until they end
MAX_TOP_K = 2**31 - 1
SEED_BITS = 53  # a seed that we draw survives every JSON reader


@dataclass(frozen=True, slots=True)
class Caller:
    """What is known of a request beside its body."""

    request_id: str
    traceparent: str
    client: str = ""  # whom it belongs to


def make_plan(
    request: ChatRequest | CompletionRequest,
    prompts: list[list[int]],
    target: Target,
    defaults: SamplingDefaults,
    caller: Caller,
) -> Plan:
    """Checks what needs the target's limits, and fills in defaults. Raises InvalidRequestError."""
    check_range("tree_budget", request.tree_budget, 1, target.max_tree_budget)
    check_range("tree_width_cap", request.tree_width_cap, 1, MAX_WIDTH)
    check_range("top_k", request.top_k, -1, MAX_TOP_K)
    for name, entries in (("stop_token_ids", request.stop_token_ids), ("logit_bias", request.logit_bias)):
        check_count(name, entries, target.vocab_size)
    stop_token_ids = request.stop_token_ids or []
    for i, token_id in enumerate(stop_token_ids):
        check_range(f"stop_token_ids[{i}]", token_id, 0, target.vocab_size - 1)
    seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed % 2**64
    samplings = [_sampling(request, derived_seed(seed, i), target, defaults) for i in range(request.n or 1)]
    stops = frozenset(stop_token_ids) if request.ignore_eos else target.stop_token_ids.union(stop_token_ids)
    choices: list[Choice] = []
    for prompt in prompts:
        max_tokens = _max_tokens(request, prompt, target)
        for sampling in samplings:
            options = GenerateOptions(
                request_id=f"{caller.request_id}-{len(choices)}"
                if len(prompts) * len(samplings) > 1
                else caller.request_id,
                prompt_token_ids=prompt,
                max_new_tokens=max_tokens,
                min_new_tokens=request.min_tokens or 0,
                sampling=sampling,
                stop_token_ids=tuple(stop_token_ids),
                ignore_model_stop=bool(request.ignore_eos),
                algorithm=request.algorithm,
                tree_budget=request.tree_budget,
                width_cap=request.tree_width_cap,
                spine=request.tree_spine,
                num_log_probs=request.num_log_probs,
                traceparent=caller.traceparent,
                client=caller.client,
            )
            limits = Limits(max_tokens, request.min_tokens or 0, stops, tuple(request.stop or ()))
            choices.append(Choice(options, limits))
    return Plan(prompts, choices, seed, target.max_batch)


def _max_tokens(request: ChatRequest | CompletionRequest, prompt: list[int], target: Target) -> int:
    """The wanted length, cut to the room in the context."""
    if isinstance(request, ChatRequest):
        left = room(prompt, "messages", target)
        wanted = request.max_completion_tokens or request.max_tokens or left
    else:
        left = room(prompt, "prompt", target)
        wanted = request.max_tokens or max(COMPLETION_MAX_TOKENS, request.min_tokens or 0)
    max_tokens = min(wanted, left)
    check_range("min_tokens", request.min_tokens, 0, max_tokens)
    return max_tokens


def _sampling(
    request: ChatRequest | CompletionRequest, seed: int, target: Target, defaults: SamplingDefaults
) -> SamplingParams:
    """The request's values over the defaults; SamplingParams checks the ranges."""

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    top_k = request.top_k if request.top_k is not None else defaults.top_k
    return SamplingParams(
        temperature=given(request.temperature, defaults.temperature),
        top_p=given(request.top_p, defaults.top_p),
        top_k=0 if top_k == -1 else top_k,  # other engines' word for no filter
        min_p=given(request.min_p, 0.0),
        seed=seed,
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request.logit_bias or {}, target),
    )


def _logit_bias(entries: dict[str, float], target: Target) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in entries.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < target.vocab_size):
            raise InvalidRequestError(
                f"logit_bias names token {show(key)}, not in [0, {target.vocab_size})", field="logit_bias"
            )
        biases[int(key)] = bias
    return biases
