"""What a drafter must say of itself before it is used."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.errors import ModelMismatchError
from draftwood.noise import NOISE_VERSION
from draftwood.rpc.wire import PROTOCOL_VERSION
from draftwood.v1 import draft_pb2
from verify_service.draft.types import DrafterFacts


@dataclass(frozen=True, slots=True)
class Expected:
    """What a drafter of this target says, besides the versions that both sides are built with."""

    target_layer_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    tokenizer_hash: str
    projection_checksum: str


def check_handshake(expected: Expected, model: draft_pb2.DraftModel) -> DrafterFacts:
    """Raises ModelMismatchError with both values where the drafter does not fit, also where it does not say."""
    pairs = [
        ("protocol_version", PROTOCOL_VERSION, model.protocol_version),
        ("noise_version", NOISE_VERSION, model.noise_version),
        ("target_layer_ids", list(expected.target_layer_ids), list(model.target_layer_ids)),
        ("hidden_size", expected.hidden_size, model.hidden_size),
        ("vocab_size", expected.vocab_size, model.vocab_size),
        ("projection_checksum", expected.projection_checksum, model.projection_checksum),
    ]
    if expected.tokenizer_hash and model.tokenizer_hash:  # a directory without a tokenizer has none
        pairs.append(("tokenizer_hash", expected.tokenizer_hash, model.tokenizer_hash))
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise ModelMismatchError(f"{name} is {theirs} at the drafter {model.model_id}, {ours} here", field=name)
    return DrafterFacts(model.model_id, model.vocab_size, model.max_depth, model.context_window, model.max_context)
