"""What the service says of itself: what a request gets where it says nothing, and which model answers."""

from __future__ import annotations

from dataclasses import dataclass

from verify_service.core.request import Limits
from verify_service.core.target_spec import TargetSpec


@dataclass(frozen=True, slots=True)
class Defaults:
    """The server's settings, resolved against its model and device."""

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
    incarnation: int
