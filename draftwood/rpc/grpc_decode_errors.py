"""Messages that cannot be decoded end their call with INVALID_ARGUMENT; by itself gRPC answers UNKNOWN and logs a
traceback, because no status can be set where a message is decoded."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from draftwood.errors import InvalidRequestError
from draftwood.rpc.conventions import abort


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands where a message would stand."""

    error: InvalidRequestError


class DecodingCheck(grpc.aio.ServerInterceptor):
    """Covers methods that are coroutines; those of a service that raise, raise into its `errors_to_status`."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The method, between a decoder that does not raise and a check of what it returned."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        method = getattr(handler, kind)
        # Methods of health and reflection may be generators, and one without a decoder takes bytes.
        if handler.request_deserializer is None or not inspect.iscoroutinefunction(method):
            return handler
        error = InvalidRequestError(f"a message of {handler_call_details.method} cannot be decoded")
        checked = _checked_many(method) if handler.request_streaming else _checked_one(method)
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(checked, _decoder(handler.request_deserializer, error), handler.response_serializer)


def _decoder(decode: Callable[[bytes], Any], error: InvalidRequestError) -> Callable[[bytes], Any]:
    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return _Undecodable(error)

    return decoded


def _checked_one(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, _Undecodable):
            await abort(context, request.error)
        return await method(request, context)

    return call


def _checked_many(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await method(_messages(requests), context)

    return call


async def _messages(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Undecodable):
            raise request.error
        yield request
