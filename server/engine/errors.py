"""Errors that a request can end with.

EngineError
├── InvalidRequestError      the request is wrong; names its field
│   └── LimitExceededError   the request exceeds a limit of this server
├── ModelNotFoundError       the model or version does not exist
├── ModelNotReadyError       the model exists but failed to load, or was taken out of service
├── RegionNotFoundError      the region of shared memory is not registered
├── ContextNotFoundError     the stored context does not exist (any more)
├── UnsupportedError         this server does not do what was asked for, or it is switched off
├── OverloadedError          too many requests are in flight; try again later
│   └── IdentityLimitError   the identity holds its share
├── DeadlineExceededError    the deadline passed before the result was ready
├── ShuttingDownError        the server is draining
└── RunFailedError           the runtime failed on this request
"""

from enum import StrEnum

# When to try again if nothing is known about when the server has room, in seconds.
RETRY_SECONDS = 0.1
# Messages quote what callers sent, and transports carry messages in headers of bounded size.
MAX_TEXT, MAX_QUOTED = 1000, 128


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def quoted(text: str) -> str:
    """A name that a caller sent, as messages quote it: escaped, and cut if it is too long for a name."""
    return repr(text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}...")


class Code(StrEnum):
    """The category of an error, named after gRPC's status codes."""

    CANCELLED = "CANCELLED"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    UNAVAILABLE = "UNAVAILABLE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    INTERNAL = "INTERNAL"


class EngineError(Exception):
    """A request failed. `reason` is short and stable, for programs; the message is for people.

    `model_digest` is that of the model that refused the request; empty if none did. `reply` is sent for
    it in a stream, which goes on; empty if the error ends the call.
    """

    code = Code.INTERNAL
    reason = "INTERNAL"
    model_digest = ""
    reply = b""

    def __init_subclass__(cls, code: Code | None = None, reason: str | None = None) -> None:
        """Sets the code and the reason of a kind of error; by default those of its parent."""
        cls.code, cls.reason = code or cls.code, reason or cls.reason

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.message = _bounded(message)
        self.field = _bounded(field)


class InvalidRequestError(EngineError, code=Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
    """The request is invalid; `field` names the input or option at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field=field)


class LimitExceededError(InvalidRequestError, reason="LIMIT_EXCEEDED"):
    """The request exceeds a limit, which the message states."""


class ModelNotFoundError(EngineError, code=Code.NOT_FOUND, reason="MODEL_NOT_FOUND"):
    """The model or the version does not exist."""


class ModelNotReadyError(EngineError, code=Code.FAILED_PRECONDITION, reason="MODEL_NOT_READY"):
    """The model exists but cannot answer; the message says why."""


class RegionNotFoundError(EngineError, code=Code.NOT_FOUND, reason="REGION_NOT_FOUND"):
    """The region of shared memory is not registered."""


class ContextNotFoundError(EngineError, code=Code.NOT_FOUND, reason="CONTEXT_NOT_FOUND"):
    """The stored context was never put here, or is gone: it expired, was dropped, or made room for others."""


class UnsupportedError(EngineError, code=Code.UNIMPLEMENTED, reason="UNSUPPORTED"):
    """This server does not do what was asked for, or it is switched off; the message says how to get it."""


class OverloadedError(EngineError, code=Code.RESOURCE_EXHAUSTED, reason="OVERLOADED"):
    """The server is at its limit; the request was not queued.

    Attributes:
        retry_after: When to try again, in seconds from now.
    """

    def __init__(self, message: str, *, retry_after: float = RETRY_SECONDS) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class IdentityLimitError(OverloadedError, reason="IDENTITY_LIMIT"):
    """The identity holds its share of a resource; the request was not queued."""


class DeadlineExceededError(EngineError, code=Code.DEADLINE_EXCEEDED, reason="DEADLINE_EXCEEDED"):
    """The caller's deadline passed before the result was ready."""


class ShuttingDownError(EngineError, code=Code.UNAVAILABLE, reason="SHUTTING_DOWN"):
    """The server does not accept new requests."""


class RunFailedError(EngineError, reason="RUN_FAILED"):
    """The runtime failed; the server's log contains the details."""
