"""Request bodies: limited in size, JSON, an object; read into requests."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request

from draftwood.config import GatewayConfig
from draftwood.errors import InvalidRequestError
from gateway.api.refusal import UnknownFields
from gateway.api.schemas import RequestT, parse

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
LARGE_BYTES = 256 << 10  # from which on a body is read off the event loop
DRAINED_BYTES = 64 << 20  # of a body that is too large, so that its sender gets to read the answer


async def read_request(
    schema: type[RequestT], request: Request, config: GatewayConfig, unknown_fields: UnknownFields
) -> RequestT:
    """The request that the body holds. Raises HTTPException 408 or 413, or InvalidRequestError."""
    try:
        async with asyncio.timeout(config.request_timeout_s):
            body = await _read_bytes(request, config.max_body_bytes)
    except TimeoutError as error:
        raise HTTPException(408, f"the body has not come within {config.request_timeout_s:g} s") from error

    def read() -> RequestT:
        fields = decode(body)
        parsed = parse(schema, fields)
        unknown_fields.warn(schema.unknown_fields(fields))
        return parsed

    return await asyncio.to_thread(read) if len(body) > LARGE_BYTES else read()


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    length = 0
    async for part in request.stream():
        length += len(part)
        if length <= max_bytes:
            body += part
        elif length > DRAINED_BYTES:
            break
    if length > max_bytes:
        raise HTTPException(413, f"the body is larger than {max_bytes} bytes")
    return bytes(body)


def decode(body: bytes) -> dict[str, Any]:
    """The object, its strings all valid Unicode. Raises InvalidRequestError."""
    try:
        text = body.decode("utf-8-sig")  # json would guess the encoding, and let half a surrogate pair through
        value: Any = json.loads(text, parse_constant=_refuse_constant)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # fails on half of a surrogate pair
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not valid Unicode: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the body is not valid Unicode: half of a surrogate pair is escaped in it") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body is not a JSON object")
    return cast("dict[str, Any]", value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
