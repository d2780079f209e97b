"""What is called at the points of a request's life, for metrics and spans."""

from __future__ import annotations

from draftwood.errors import DraftwoodError
from gateway.generation.outcome import Outcome
from gateway.generation.plan import Plan


class GenerationHooks:
    """The methods of this class do nothing; subclasses override them."""

    def named(self, response_id: str, model: str) -> None:
        """The response has an id, and a model will answer."""

    def planned(self, plan: Plan) -> None:
        """The request is about to be sent to the verify service."""

    def grew(self) -> None:
        """An answer has text, or more of it."""

    def ended(self, outcome: Outcome) -> None:
        """One of the answers has ended."""

    def failed(self, error: DraftwoodError) -> None:
        """The request ends with an error."""


NO_HOOKS = GenerationHooks()
