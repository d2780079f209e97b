"""What a request gets where it says nothing."""

from __future__ import annotations

from dataclasses import dataclass

from verify_service.core.request import Limits


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
