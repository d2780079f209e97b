"""OpenAI's error objects and the headers that tell clients whether to come back."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

from draftwood.errors import DraftwoodError, OverloadedError, UnavailableError

DEFAULT_RETRY_AFTER_S = 1.0
CLIENT_CLOSED_REQUEST = 499  # a status for logs and metrics alone: whoever hung up does not read it


def error_object(message: str, status: int, code: str, field: str | None = None) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def from_error(error: DraftwoodError) -> dict[str, Any]:
    """The error object of one of our errors."""
    return error_object(error.message, error.http_status, error.reason, error.field)


def error_response(error: DraftwoodError) -> JSONResponse:
    """The whole response of one of our errors."""
    headers: dict[str, str] = {}
    if isinstance(error, OverloadedError | UnavailableError):
        retry_after_s = error.retry_after_s or DEFAULT_RETRY_AFTER_S
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
        headers["retry-after-ms"] = str(math.ceil(retry_after_s * 1000))
        headers["x-should-retry"] = "true"
    else:
        headers["x-should-retry"] = "false"
    return JSONResponse(from_error(error), error.http_status, headers)
