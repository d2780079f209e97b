"""Between the values of a draft stream and its messages. What comes from a drafter is untrusted, and checked here."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from draftwood.errors import MalformedTreeError
from draftwood.rpc.wire import sampling_to_wire, tree_from_wire, tree_options_to_wire
from draftwood.tree import DraftTree
from draftwood.v1 import draft_pb2
from verify_service.draft.types import ContextRows, DrafterFacts, DraftJob, DroppedResults, Refusal, RefusalReason

log = logging.getLogger(__name__)

_REASONS = {
    number: RefusalReason[name.removeprefix("REFUSAL_REASON_")]
    for name, number in draft_pb2.RefusalReason.items()
    if number != draft_pb2.REFUSAL_REASON_UNSPECIFIED
}


def write_job(job: DraftJob, standing: dict[int, draft_pb2.DraftSequence], message: draft_pb2.DraftSequence) -> None:
    """Fills in an empty message. What stays the same from step to step is kept in `standing`, by sequence id: made
    anew, it would be a third of a message's time."""
    if job.sequence_id not in standing:
        tree, sampling = tree_options_to_wire(job.tree), sampling_to_wire(job.sampling)
        standing[job.sequence_id] = draft_pb2.DraftSequence(sequence_id=job.sequence_id, tree=tree, sampling=sampling)
    message.CopyFrom(standing[job.sequence_id])
    message.epoch, message.base_length, message.root_token_id = job.epoch, job.base_length, job.root
    if job.context is not None:
        write_rows(job.context, message.context)


def write_rows(rows: ContextRows, message: draft_pb2.ContextRows) -> None:
    """Fills in an empty message."""
    message.start, message.features = rows.start, rows.features
    message.format = draft_pb2.FEATURE_FORMAT_BFLOAT16 if rows.is_bfloat16 else draft_pb2.FEATURE_FORMAT_FLOAT32


def outcomes_from_wire(
    results: Sequence[draft_pb2.DraftResult], jobs: Sequence[DraftJob], facts: DrafterFacts, dropped: DroppedResults
) -> dict[int, DraftTree | Refusal]:
    """One outcome per job, by sequence id. What is stale or malformed is counted in `dropped` and becomes a refusal."""
    wanted = {job.sequence_id: job for job in jobs}
    outcomes: dict[int, DraftTree | Refusal] = {}
    for result in results:
        job = wanted.get(result.sequence_id)
        if job is None or (result.epoch, result.base_length, result.root_token_id) != (
            job.epoch,
            job.base_length,
            job.root,
        ):
            dropped.mismatched += 1
            continue
        outcomes[job.sequence_id] = _outcome(result, job, facts, dropped)
    for job in jobs:
        outcomes.setdefault(job.sequence_id, Refusal(RefusalReason.STALE))
    return outcomes


def _outcome(
    result: draft_pb2.DraftResult, job: DraftJob, facts: DrafterFacts, dropped: DroppedResults
) -> DraftTree | Refusal:
    if result.WhichOneof("outcome") != "tree":
        refusal = result.refusal
        reason = _REASONS.get(refusal.reason, RefusalReason.INVALID)
        return Refusal(reason, refusal.message, refusal.context_length)
    try:
        return tree_from_wire(
            result.tree,
            job.root,
            vocab_size=facts.vocab_size,
            tree_budget=job.tree.tree_budget,
            max_depth=facts.max_depth,
        )
    except MalformedTreeError as error:
        dropped.rejected += 1
        log.warning("rejected a tree: %s", error.message)
        return Refusal(RefusalReason.MALFORMED, error.message)
