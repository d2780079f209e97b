"""Request bodies: limited in size, JSON, an object."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request

from draftwood.errors import InvalidRequestError

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
DRAINED_BYTES = 64 << 20  # of a body that is too large, so that its sender gets to read the answer


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body's object. Raises HTTPException 413 or InvalidRequestError."""
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
    try:
        value: Any = json.loads(body, parse_constant=_refuse_constant)
        if SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()  # fails on half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body is not a JSON object")
    return cast("dict[str, Any]", value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
