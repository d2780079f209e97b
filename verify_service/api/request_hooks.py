"""What is called with what becomes of a request on its way through the servicer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from draftwood.errors import DraftwoodError
from verify_service.core.events import Finished
from verify_service.core.request import Request


class RequestHooks:
    """For one call of Generate, on the event loop. These do nothing; telemetry overrides them."""

    def received(self, request: Request) -> Request:
        """The request is in order; returned as it goes to the engine."""
        return request

    def grew(self) -> None:
        """Tokens have come."""

    def finished(self, event: Finished) -> None:
        """It was answered."""

    def failed(self, error: DraftwoodError) -> None:
        """It ends with an error."""

    def gone(self) -> None:
        """The call is over, however; the last word."""

    @asynccontextmanager
    async def errors(self) -> AsyncGenerator[None]:
        """Sees the errors that are raised inside."""
        try:
            yield
        except DraftwoodError as error:
            self.failed(error)
            raise
