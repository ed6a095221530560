"""Why a request is refused or fails.

EngineError
├── InvalidRequestError      the request is wrong; names its field
│   └── LimitExceededError   the request is larger than this server takes
├── ModelNotFoundError       no such model or version
├── ModelNotReadyError       the model is there and failed to load
├── OverloadedError          too much is in flight; try again later
├── DeadlineExceededError    the caller's time was over before the result was there
├── ShuttingDownError        the server is draining
└── RunFailedError           the runtime failed on this request alone
"""

from enum import StrEnum

# Names and words that callers sent come back in messages, which transports carry in bounded headers.
MAX_TEXT = 1000


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


class Code(StrEnum):
    """What kind of failure it is, by the names of gRPC's status codes."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


class EngineError(Exception):
    """A request without a result. `reason` is short and stable, the message is for people."""

    code = Code.INTERNAL
    reason = "INTERNAL"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.message = _bounded(message)
        self.field = _bounded(field)


class InvalidRequestError(EngineError):
    """The request is wrong in itself; `field` names the input or option at fault."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_FIELD"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field=field)


class LimitExceededError(InvalidRequestError):
    """The request is larger than a limit, which the message states."""

    reason = "LIMIT_EXCEEDED"


class ModelNotFoundError(EngineError):
    """There is no such model, or no such version of it."""

    code = Code.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class ModelNotReadyError(EngineError):
    """The model is in the repository and cannot answer; the message says why."""

    code = Code.FAILED_PRECONDITION
    reason = "MODEL_NOT_READY"


class OverloadedError(EngineError):
    """The server holds as much as it may; the request was not queued."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"


class DeadlineExceededError(EngineError):
    """The caller's deadline passed while the request waited or ran."""

    code = Code.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class ShuttingDownError(EngineError):
    """The server takes no new requests."""

    code = Code.UNAVAILABLE
    reason = "SHUTTING_DOWN"


class RunFailedError(EngineError):
    """The runtime failed; details are in the server's log."""

    reason = "RUN_FAILED"
