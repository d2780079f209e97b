"""What an answer cost: the verify service's figures, summed over the choices of a request, in OpenAI's `usage` and in
the `draftwood` object beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.generation.outcome import Outcome


def _total(values: Sequence[float | None]) -> float | None:
    """Sum to the microsecond; None as soon as one part is not known."""
    known = [value for value in values if value is not None]
    return round(sum(known), 3) if len(known) == len(values) else None


def usage(prompt_lengths: Sequence[int], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """OpenAI's usage object. Each prompt counts once, however many choices it has."""
    num_prompt = sum(prompt_lengths)
    num_completion = sum(outcome.num_tokens for outcome in outcomes)
    accepted = sum(outcome.stats.num_accepted_tokens for outcome in outcomes)
    drafted = sum(outcome.stats.num_drafted_tokens for outcome in outcomes)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": 0},  # no part of a prompt is kept for the next request
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def draftwood_object(seed: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Our extension of the response: times are sums over the choices, in milliseconds.

    After a stop string `fallback_steps`, the entries of `stage_ms`, `transport_p50_ms`, `queue_ms`, `prefill_ms` and
    `decode_ms` are null: the gateway ends the call there, before the verify service has said what it cost.
    """
    stats = [outcome.stats for outcome in outcomes]
    num_steps = sum(entry.num_steps for entry in stats)
    num_step_tokens = sum(outcome.num_step_tokens for outcome in outcomes)
    fallback = _total([entry.num_fallback_steps for entry in stats])
    transport = [entry.transport_p50_ms for entry in stats if entry.transport_p50_ms is not None]
    return {
        "seed": seed,
        "steps": num_steps,
        "tokens_per_step": round(num_step_tokens / num_steps, 3) if num_steps else None,
        "drafted": sum(entry.num_drafted_tokens for entry in stats),
        "accepted": sum(entry.num_accepted_tokens for entry in stats),
        "fallback_steps": None if fallback is None else int(fallback),
        "stage_ms": {
            "draft": _total([entry.draft_ms for entry in stats]),
            "tree": _total([entry.tree_ms for entry in stats]),
            "verify": _total([entry.verify_ms for entry in stats]),
            "accept": _total([entry.accept_ms for entry in stats]),
            "commit": _total([entry.commit_ms for entry in stats]),
        },
        "transport_p50_ms": max(transport) if len(transport) == len(stats) and transport else None,
        "queue_ms": _total([entry.queue_ms for entry in stats]),
        "prefill_ms": _total([entry.prefill_ms for entry in stats]),
        "decode_ms": _total([entry.decode_ms for entry in stats]),
    }
