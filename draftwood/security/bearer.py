"""The shared token on calls: clients add it to their metadata, and a server's guard asks each call for it."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from draftwood.errors import UnauthenticatedError
from draftwood.rpc.conventions import abort
from draftwood.security.auth_tokens import is_known

METADATA_KEY = "authorization"


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls without the token, whatever they ask for: health and reflection too."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Any,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Passes the call on, or takes it in the method's place."""
        metadata = dict(handler_call_details.invocation_metadata or ())
        presented = metadata.get(METADATA_KEY)
        if isinstance(presented, str) and is_known(presented, self._tokens):
            return await continuation(handler_call_details)
        what = "with another token than its own" if presented else "without its token"
        # Whatever kind the method is, this one fits: it reads no message before it answers.
        return grpc.stream_stream_rpc_method_handler(_refusal(f"the service refuses calls {what} (--token-file)"))


def _refusal(message: str) -> Any:
    async def refuse(_messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, UnauthenticatedError(message))

    return refuse


def aio_interceptors(value: str) -> list[grpc.aio.ClientInterceptor]:
    """One for each kind of call: asyncio's channel takes an interceptor for one kind only."""
    return [_UnaryUnary(value), _UnaryStream(value), _StreamUnary(value), _StreamStream(value)]


class _Token:
    def __init__(self, value: str) -> None:
        self._value = value

    def _add(self, details: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add(METADATA_KEY, self._value)
        return details._replace(metadata=metadata)


class _UnaryUnary(_Token, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._add(client_call_details), request)


class _UnaryStream(_Token, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._add(client_call_details), request)


class _StreamUnary(_Token, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(self._add(client_call_details), request_iterator)


class _StreamStream(_Token, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(self._add(client_call_details), request_iterator)


class SyncToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the token to each call of a channel for threads."""

    def __init__(self, value: str) -> None:
        self._value = value

    def _add(self, details: Any) -> Any:
        return _Details(details, [*(details.metadata or ()), (METADATA_KEY, self._value)])

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """One message, one answer."""
        return continuation(self._add(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """One message, many answers."""
        return continuation(self._add(client_call_details), request)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Many messages, one answer."""
        return continuation(self._add(client_call_details), request_iterator)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Messages both ways."""
        return continuation(self._add(client_call_details), request_iterator)


class _Details(grpc.ClientCallDetails):
    def __init__(self, details: Any, metadata: Any) -> None:
        for name in ("method", "timeout", "credentials", "wait_for_ready", "compression"):
            setattr(self, name, getattr(details, name, None))
        self.metadata = metadata
