"""The errors that leave a service, each leaf with one gRPC and one HTTP status.

DraftwoodError
├── InvalidRequestError           INVALID_ARGUMENT      400   bad input; names the field
│   └── ContextLengthError        OUT_OF_RANGE          400   prompt and answer do not fit the context
├── UnauthenticatedError          UNAUTHENTICATED       401   no token, or a wrong one
├── ModelNotFoundError            NOT_FOUND             404   no such model is served
├── ConfigError                   FAILED_PRECONDITION   500   a setting is wrong; names it and its value
├── UnsupportedModelError         FAILED_PRECONDITION   500   a checkpoint or layer that cannot be served
├── ModelMismatchError            FAILED_PRECONDITION   500   target and draft model do not belong together
├── MalformedTreeError            INVALID_ARGUMENT      500   a drafter sent a tree that breaks the contract
├── OverloadedError               RESOURCE_EXHAUSTED    429   the queue is full; carries a retry time
├── UnavailableError              UNAVAILABLE           503   a service is down or going down
├── DeadlineError                 DEADLINE_EXCEEDED     504   out of time
└── InternalError                 INTERNAL              500   a fault of ours
"""

from __future__ import annotations

from typing import ClassVar

import grpc

DOMAIN = "draftwood"


class DraftwoodError(Exception):
    """Base of all errors with a status. `field` names the input at fault, in the words of whoever sent it."""

    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    reason: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequestError(DraftwoodError):
    """Bad input."""

    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    reason = "invalid_request"


class ContextLengthError(InvalidRequestError):
    """Prompt and answer do not fit the model's context."""

    grpc_status = grpc.StatusCode.OUT_OF_RANGE
    reason = "context_length_exceeded"


class UnauthenticatedError(DraftwoodError):
    """A call or request without the token or key that is asked for."""

    grpc_status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    reason = "unauthenticated"


class ModelNotFoundError(DraftwoodError):
    """No model of that name is served."""

    grpc_status = grpc.StatusCode.NOT_FOUND
    http_status = 404
    reason = "model_not_found"


class ConfigError(DraftwoodError):
    """A setting is wrong."""

    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "invalid_configuration"


class UnsupportedModelError(DraftwoodError):
    """A checkpoint, architecture or layer that cannot be served."""

    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "unsupported_model"


class ModelMismatchError(DraftwoodError):
    """Target and draft model do not belong together."""

    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "model_mismatch"


class MalformedTreeError(DraftwoodError):
    """A drafter sent a tree that breaks the contract."""

    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    reason = "malformed_tree"


class OverloadedError(DraftwoodError):
    """No room now; come back after `retry_after_s`."""

    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    reason = "overloaded"


class UnavailableError(DraftwoodError):
    """A service is down or going down."""

    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    reason = "unavailable"


class DeadlineError(DraftwoodError):
    """The work was not done in time."""

    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    reason = "deadline_exceeded"


class InternalError(DraftwoodError):
    """A fault of ours."""


LEAVES: tuple[type[DraftwoodError], ...] = (
    InvalidRequestError,
    ContextLengthError,
    UnauthenticatedError,
    ModelNotFoundError,
    ConfigError,
    UnsupportedModelError,
    ModelMismatchError,
    MalformedTreeError,
    OverloadedError,
    UnavailableError,
    DeadlineError,
    InternalError,
)
