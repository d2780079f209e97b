"""gRPC conventions of all services: channel options, status codes with google.rpc details, and back to errors."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from draftwood.errors import DOMAIN, LEAVES, DraftwoodError, InternalError, UnavailableError

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20

# Both ends ping idle connections and tolerate each other's pings. gRPC ignores unknown keys in silence, so a test
# compares these with the names that the library documents.
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]
CLIENT_OPTIONS: list[tuple[str, Any]] = [
    *CHANNEL_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def open_channel(address: str) -> grpc.aio.Channel:
    """A plain channel to `host:port` with the project's options; services open theirs with `Security.channel`."""
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)


def to_status(error: DraftwoodError) -> status_pb2.Status:
    """The error as google.rpc.Status: ErrorInfo always, BadRequest with the field, RetryInfo with the retry time."""
    details: list[any_pb2.Any] = []

    def add(message: Any) -> None:
        packed = any_pb2.Any()
        packed.Pack(message)
        details.append(packed)

    add(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        add(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromTimedelta(timedelta(seconds=error.retry_after_s))
        add(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=error.grpc_status.value[0], message=error.message, details=details)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: DraftwoodError) -> NoReturn:
    """Ends a call with the error's status and details."""
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status returned")


@asynccontextmanager
async def errors_to_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[None]:
    """Turns a DraftwoodError raised inside into the call's status; anything else becomes INTERNAL and is logged."""
    try:
        yield
    except DraftwoodError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("a call failed")
        await abort(context, InternalError("an internal error; see the service's log"))


def from_rpc_error(error: grpc.aio.AioRpcError) -> DraftwoodError:
    """The error that a peer reported, rebuilt from its status and details."""
    reason, field, retry_after_s = "", None, None
    status = rpc_status.from_call(error)  # pyright: ignore[reportArgumentType]
    for detail in status.details if status is not None else ():
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    message = refusal_in_handshake(error) or error.details() or error.code().name
    for leaf in LEAVES:
        if leaf.reason == reason and leaf.grpc_status == error.code():
            return leaf(message, field=field, retry_after_s=retry_after_s)
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(message, retry_after_s=1.0)
    return next(
        (leaf(message) for leaf in LEAVES if leaf.grpc_status == error.code()),
        InternalError(f"{error.code().name}: {message}"),
    )


# What gRPC says of a connection that did not come about, and which side is to blame.
_HANDSHAKES = (
    ("certificate has expired", "this side refused the other's certificate: it has expired"),
    ("certificate is not yet valid", "this side refused the other's certificate: it is not valid yet"),
    ("Hostname Verification Check failed", "this side refused the other's certificate: it is for another name"),
    ("CERTIFICATE_VERIFY_FAILED", "this side refused the other's certificate: --tls-ca does not trust who signed it"),
    ("WRONG_VERSION_NUMBER", "the other side does not speak TLS, this side does (--tls-ca)"),
    (
        "Socket closed",
        "the other side closed the connection at once, as it does where it refuses this side's certificate or misses "
        "one (--tls-cert), and where it speaks TLS and this side does not (--tls-ca)",
    ),
)


def refusal_in_handshake(error: grpc.RpcError) -> str | None:
    """Which side refused the other while they connected, and why; None where it was something else."""
    if not isinstance(error, grpc.aio.AioRpcError | grpc.Call) or error.code() != grpc.StatusCode.UNAVAILABLE:
        return None
    details = error.details() or ""
    if "failed to connect" not in details:
        return None
    return next((meaning for words, meaning in _HANDSHAKES if words in details), None)
