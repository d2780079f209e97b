"""Between the engine's values and the messages of VerifyService; only the servicer calls this."""

from __future__ import annotations

import secrets
import statistics
from dataclasses import dataclass
from typing import Any

from draftwood.errors import ContextLengthError, InvalidRequestError
from draftwood.rpc.wire import ALGORITHM_FROM_WIRE, microseconds, sampling_from_wire, tree_to_wire
from draftwood.telemetry import MAX_TRACEPARENT
from draftwood.v1 import tree_pb2, verify_pb2
from verify_service.core.accept import Finish
from verify_service.core.events import Finished, Started, TokenLogProbs, Tokens, Trace
from verify_service.core.request import Limits, Request
from verify_service.core.stats import StageTimes, Stats
from verify_service.core.target_spec import TargetSpec

COUNTS = (  # of Stats and of GenerateStats
    "num_prompt_tokens", "num_generated_tokens", "num_steps", "num_drafted_steps", "num_drafted_tokens",
    "num_accepted_tokens", "num_fallback_steps", "accepted_histogram", "drafted_by_depth", "shadow_tree_tokens",
)  # fmt: skip
FINISH_TO_WIRE = {
    Finish.STOP: verify_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: verify_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request gets where it says nothing: the server's settings, resolved against its model and device."""

    limits: Limits
    algorithm: str
    tree_budget: int
    width_cap: int
    spine: bool
    stop_token_ids: frozenset[int]
    shadow_linear: bool = False
    is_drafted: bool = True  # whether there is a drafter, now or later; without one nothing is drafted


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What GetTargetModel says about the model."""

    spec: TargetSpec
    model_id: str
    dtype: str
    tokenizer_hash: str
    projection_checksum: str  # empty without a draft model


def target_to_wire(facts: TargetFacts, max_context: int) -> verify_pb2.TargetModel:
    """The model, as clients are told of it."""
    return verify_pb2.TargetModel(
        model_id=facts.model_id,
        vocab_size=facts.spec.vocab_size,
        max_context=max_context,
        stop_token_ids=facts.spec.stop_token_ids,
        tokenizer_hash=facts.tokenizer_hash,
        hidden_size=facts.spec.hidden_size,
        dtype=facts.dtype,
        model_type=facts.spec.model_type,
        projection_checksum=facts.projection_checksum,
    )


def request_from_wire(message: verify_pb2.GenerateRequest, defaults: Defaults, peer: str = "") -> Request:
    """Fills in the server's defaults, and `peer` for the client. Raises InvalidRequestError for what no default can
    mend."""
    has = message.HasField
    _check_lengths(message, defaults)
    prompt = tuple(message.prompt_token_ids)
    room = max(defaults.limits.max_context - len(prompt), 1)
    algorithm = defaults.algorithm
    if message.algorithm != tree_pb2.ALGORITHM_UNSPECIFIED:
        if message.algorithm not in ALGORITHM_FROM_WIRE:
            raise InvalidRequestError(f"algorithm is {message.algorithm}, which is not known", field="algorithm")
        algorithm = ALGORITHM_FROM_WIRE[message.algorithm]
    stop = frozenset(message.stop_token_ids)
    return Request(
        request_id=message.request_id or secrets.token_hex(8),
        prompt_token_ids=prompt,
        max_new_tokens=message.max_new_tokens if has("max_new_tokens") else room,
        min_new_tokens=message.min_new_tokens,
        sampling=sampling_from_wire(message.sampling, seed=secrets.randbits(64), vocab_size=defaults.limits.vocab_size),
        stop_token_ids=stop if message.ignore_model_stop else stop | defaults.stop_token_ids,
        algorithm=algorithm if defaults.is_drafted else "none",
        tree_budget=message.tree_budget if has("tree_budget") else defaults.tree_budget,
        width_cap=message.width_cap if has("width_cap") else defaults.width_cap,
        spine=message.spine if has("spine") else defaults.spine,
        num_log_probs=message.num_log_probs if has("num_log_probs") else None,
        num_prompt_log_probs=message.num_prompt_log_probs if has("num_prompt_log_probs") else None,
        trace_steps=message.trace_steps,
        shadow_linear=_shadow_linear(message, defaults, algorithm),
        traceparent=message.traceparent if len(message.traceparent) <= MAX_TRACEPARENT else "",
        client=message.client or peer,
    )


def _shadow_linear(message: verify_pb2.GenerateRequest, defaults: Defaults, algorithm: str) -> bool:
    if not message.HasField("shadow_linear"):
        return defaults.shadow_linear and algorithm == "ddtree" and defaults.is_drafted
    if message.shadow_linear and algorithm != "ddtree":
        raise InvalidRequestError(
            f"shadow_linear compares with a tree; algorithm is {algorithm}, not ddtree", field="shadow_linear"
        )
    return message.shadow_linear and defaults.is_drafted


def _check_lengths(message: verify_pb2.GenerateRequest, defaults: Defaults) -> None:
    """Before anything walks the lists: this is the event loop, and a message may hold millions of entries."""
    limits = defaults.limits
    length = len(message.prompt_token_ids)
    if length + 1 > limits.max_context:
        raise ContextLengthError(
            f"the prompt has {length} tokens; this model's maximum context length is {limits.max_context} tokens, "
            f"at least one of them for the answer",
            field="prompt_token_ids",
        )
    lists = (("stop_token_ids", message.stop_token_ids), ("logit_bias", message.sampling.logit_bias))
    for name, entries in lists:
        if len(entries) > limits.vocab_size:
            raise InvalidRequestError(
                f"{name} has {len(entries)} entries, more than the vocabulary's {limits.vocab_size} tokens", field=name
            )


def event_to_wire(event: Started | Tokens | Finished, request: Request) -> verify_pb2.GenerateResponse:
    """`request` is what the event answers."""
    match event:
        case Started(prompt_log_probs):
            started = verify_pb2.GenerateStarted(
                request_id=request.request_id,
                seed=request.sampling.seed,
                prompt_log_probs=map(_log_probs_to_wire, prompt_log_probs),
            )
            return verify_pb2.GenerateResponse(started=started)
        case Tokens(token_ids, log_probs, trace, num_drafted, num_accepted):
            chunk = verify_pb2.TokenChunk(
                token_ids=token_ids,
                log_probs=map(_log_probs_to_wire, log_probs),
                trace=_trace_to_wire(trace) if trace is not None else None,
                num_drafted_tokens=num_drafted,
                num_accepted_tokens=num_accepted,
            )
            return verify_pb2.GenerateResponse(chunk=chunk)
        case Finished(reason, stop_token_id, stats):
            finished = verify_pb2.GenerateFinished(
                reason=FINISH_TO_WIRE[reason], stop_token_id=stop_token_id, stats=_stats_to_wire(stats)
            )
            return verify_pb2.GenerateResponse(finished=finished)


def _log_probs_to_wire(entry: TokenLogProbs) -> verify_pb2.TokenLogProbs:
    return verify_pb2.TokenLogProbs(
        token_id=entry.token_id,
        log_prob=entry.log_prob,
        top_token_ids=[token for token, _ in entry.top],
        top_log_probs=[value for _, value in entry.top],
    )


def _trace_to_wire(trace: Trace) -> verify_pb2.StepTrace:
    return verify_pb2.StepTrace(
        base_length=trace.base_length,
        root_token_id=trace.tree.token_ids[0],
        tree=tree_to_wire(trace.tree),
        accepted_path=trace.path,
        shadow_path=trace.shadow_path,
        **_times_to_wire(trace.times),
    )


def _stats_to_wire(stats: Stats) -> verify_pb2.GenerateStats:
    return verify_pb2.GenerateStats(
        queue_us=microseconds(stats.queue_s),
        prefill_us=microseconds(stats.prefill_s),
        decode_us=microseconds(stats.decode_s),
        transport_p50_us=microseconds(statistics.median(stats.transport_s or [0.0])),
        **{name: getattr(stats, name) for name in COUNTS},
        **_times_to_wire(stats.times),
    )


def _times_to_wire(times: StageTimes) -> dict[str, Any]:
    """Fields that both messages have; neither has one for transport."""
    return {f"{stage}_us": microseconds(seconds) for stage, seconds in times._asdict().items() if stage != "transport"}
