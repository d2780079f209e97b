"""Between wire messages and the engine's values. What comes in is untrusted: errors name the field and the value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_service.draft.candidates import Candidates
from draft_service.draft.types import ContextRows, Drafted, Refusal, RefusalReason, SequenceStep
from draft_service.model.config import DrafterConfig
from draftwood import __version__
from draftwood.errors import InvalidRequestError, UnsupportedModelError
from draftwood.noise import NOISE_VERSION
from draftwood.ranges import check_range
from draftwood.rpc.wire import ALGORITHM_FROM_WIRE, PROTOCOL_VERSION, sampling_from_wire, tree_to_wire
from draftwood.sampling import SamplingParams
from draftwood.tree import MAX_TREE_BUDGET, MAX_WIDTH
from draftwood.tree_options import TreeOptions
from draftwood.v1 import draft_pb2, tree_pb2

_ITEM_BYTES = {draft_pb2.FEATURE_FORMAT_BFLOAT16: 2, draft_pb2.FEATURE_FORMAT_FLOAT32: 4}

_REASON_TO_WIRE = {
    RefusalReason.CACHE_FULL: draft_pb2.REFUSAL_REASON_CACHE_FULL,
    RefusalReason.CONTEXT_INCOMPLETE: draft_pb2.REFUSAL_REASON_CONTEXT_INCOMPLETE,
    RefusalReason.UNSUPPORTED: draft_pb2.REFUSAL_REASON_UNSUPPORTED,
    RefusalReason.DEADLINE: draft_pb2.REFUSAL_REASON_DEADLINE,
    RefusalReason.INVALID: draft_pb2.REFUSAL_REASON_INVALID,
}


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What the handshake says of the served draft model."""

    model_id: str
    config: DrafterConfig
    max_context: int
    tokenizer_hash: str
    projection_checksum: str
    incarnation: int


def handshake_to_wire(facts: DrafterFacts) -> draft_pb2.GetDraftModelResponse:
    """With the versions that this side is built with."""
    config = facts.config
    model = draft_pb2.DraftModel(
        model_id=facts.model_id,
        block_size=config.block_size,
        max_depth=config.max_depth,
        target_layer_ids=config.target_layer_ids,
        mask_token_id=config.mask_token_id,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        tokenizer_hash=facts.tokenizer_hash,
        projection_checksum=facts.projection_checksum,
        context_window=config.context_window,
        max_context=facts.max_context,
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
    )
    return draft_pb2.GetDraftModelResponse(model=model, incarnation=facts.incarnation, version=__version__)


def check_epoch(epoch: int) -> None:
    """Epochs count from 1."""
    if epoch < 1:
        raise InvalidRequestError("epoch is 0; epochs count from 1", field="epoch")


def context_from_wire(message: draft_pb2.ContextRows, config: DrafterConfig) -> ContextRows:
    """Checks that the features are whole rows and all finite."""
    item = _ITEM_BYTES.get(message.format)
    if item is None:
        raise InvalidRequestError(f"format is {message.format}, not a known feature format", field="context.format")
    row = config.hidden_size * item
    if len(message.features) % row:
        raise InvalidRequestError(
            f"features hold {len(message.features)} bytes, which is no multiple of a row's {row}",
            field="context.features",
        )
    features = _features(message.features, message.format, config.hidden_size)
    if not torch.isfinite(features).all():
        raise InvalidRequestError("a feature is not finite", field="context.features")
    return ContextRows(message.start, features)


def _features(data: bytes, kind: int, hidden_size: int) -> Tensor:  # [n, hidden_size]
    if kind == draft_pb2.FEATURE_FORMAT_FLOAT32:
        values: NDArray[np.float32] = np.frombuffer(data, "<f4").astype(np.float32)  # a copy: torch wants to write
        return torch.from_numpy(values).view(-1, hidden_size)
    bits: NDArray[np.int16] = np.frombuffer(data, "<i2").astype(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16).view(-1, hidden_size)


def tree_options_from_wire(message: tree_pb2.TreeOptions) -> TreeOptions:
    """Checks ranges. Raises UnsupportedModelError for an algorithm that this version does not know."""
    algorithm = ALGORITHM_FROM_WIRE.get(message.algorithm)
    if algorithm is None and message.algorithm != tree_pb2.ALGORITHM_UNSPECIFIED:
        raise UnsupportedModelError(
            f"algorithm is {message.algorithm}, which is not known here", field="tree.algorithm"
        )
    if algorithm is None or algorithm == "none":
        raise InvalidRequestError(f"algorithm is {algorithm}, which drafts nothing", field="tree.algorithm")
    check_range("tree.tree_budget", message.tree_budget, 1, MAX_TREE_BUDGET)
    check_range("tree.width_cap", message.width_cap, 1, MAX_WIDTH)
    check_range("tree.num_candidates", message.num_candidates, 0, MAX_WIDTH)
    return TreeOptions(algorithm, message.tree_budget, message.width_cap, message.spine, message.num_candidates)


def step_from_wire(message: draft_pb2.DraftSequence, config: DrafterConfig) -> SequenceStep | Refusal:
    """One sequence's part of a message; what is wrong with it refuses this sequence only."""
    try:
        check_epoch(message.epoch)
        check_range("root_token_id", message.root_token_id, 0, config.vocab_size - 1)
        sampling: SamplingParams = sampling_from_wire(message.sampling, seed=0, vocab_size=config.vocab_size)
        return SequenceStep(
            sequence_id=message.sequence_id,
            epoch=message.epoch,
            base_length=message.base_length,
            root=message.root_token_id,
            context=context_from_wire(message.context, config) if message.HasField("context") else None,
            tree=tree_options_from_wire(message.tree) if message.HasField("tree") else None,
            sampling=sampling,
        )
    except InvalidRequestError as error:
        return Refusal(RefusalReason.INVALID, error.message)
    except UnsupportedModelError as error:
        return Refusal(RefusalReason.UNSUPPORTED, error.message)


def result_to_wire(message: draft_pb2.DraftSequence, result: Drafted | Refusal) -> draft_pb2.DraftResult:
    """The outcome with the echo of what it answers."""
    echo = draft_pb2.DraftResult(
        sequence_id=message.sequence_id,
        epoch=message.epoch,
        base_length=message.base_length,
        root_token_id=message.root_token_id,
    )
    if isinstance(result, Refusal):
        echo.refusal.reason = _REASON_TO_WIRE[result.reason]
        echo.refusal.message = result.message
        echo.refusal.context_length = result.context_length
        return echo
    echo.tree.CopyFrom(tree_to_wire(result.tree))
    if result.candidates is not None:
        echo.candidates.CopyFrom(_candidates_to_wire(result.candidates))
    return echo


def _candidates_to_wire(candidates: Candidates) -> tree_pb2.DepthCandidates:
    return tree_pb2.DepthCandidates(
        num_depths=len(candidates.token_ids),
        width=len(candidates.token_ids[0]),
        token_ids=np.array(candidates.token_ids, "<i4").tobytes(),
        log_probs=np.array(candidates.log_probs, "<f4").tobytes(),
    )


def check_sequences(sequences: Iterable[draft_pb2.DraftSequence]) -> None:
    """A message speaks of each sequence once."""
    seen: set[int] = set()
    for sequence in sequences:
        if sequence.sequence_id in seen:
            raise InvalidRequestError(f"sequence_id {sequence.sequence_id} comes twice", field="sequences")
        seen.add(sequence.sequence_id)
