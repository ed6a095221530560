"""The client's exceptions: changes where a new kind of refusal should be told apart.

AttentionClientError
├── InvalidArgumentError     (ValueError)       the request is wrong, to the client or to the server
├── NotFoundError                               no such model or version
├── FailedPreconditionError                     the model exists and cannot answer, or not in this way
├── ResourceExhaustedError                      too large, or the server is full: ask for less, or later
├── DeadlineExceededError    (TimeoutError)     no answer in time
├── UnavailableError         (ConnectionError)  no server, or it went away: the call may be repeated
├── CallCancelledError                          cancelled, for example because the client was closed
├── InternalError                               the server failed, or its answer cannot be read
├── UnauthenticatedError                        the server does not know who asks
└── PermissionDeniedError                       the server knows, and does not allow it

A status without a class of its own, such as UNIMPLEMENTED, is an AttentionClientError.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from attention_client._generated.attention.v1 import attention_pb2 as pb

_DOMAIN = "attention.v1"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class AttentionClientError(Exception):
    """Why a call has no result.

    Attributes:
        message: For people.
        code: The gRPC status; an error of the client's own has the code of its class.
        reason: Short and stable, for programs, such as "LIMIT_EXCEEDED"; empty where the server gave none.
        field: The request's field or the call's argument at fault; empty where none is.
    """

    code: grpc.StatusCode | None = None

    def __init__(
        self, message: str, *, code: grpc.StatusCode | None = None, reason: str = "", field: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code if code is not None else type(self).code
        self.reason = reason
        self.field = field


class InvalidArgumentError(AttentionClientError, ValueError):
    """The request is wrong and stays wrong; `field` says where."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFoundError(AttentionClientError):
    """The server has no such model or version."""

    code = grpc.StatusCode.NOT_FOUND


class FailedPreconditionError(AttentionClientError):
    """The model exists and cannot answer, or not in this way."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhaustedError(AttentionClientError):
    """The request is larger than a limit, or the server's queue is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceededError(AttentionClientError, TimeoutError):
    """No answer came in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class UnavailableError(AttentionClientError, ConnectionError):
    """There is no server at the target, or it went away."""

    code = grpc.StatusCode.UNAVAILABLE


class CallCancelledError(AttentionClientError):
    """The call was cancelled by the server, or because the client was closed."""

    code = grpc.StatusCode.CANCELLED


class InternalError(AttentionClientError):
    """The server failed, or its answer cannot be read."""

    code = grpc.StatusCode.INTERNAL


class UnauthenticatedError(AttentionClientError):
    """The server does not know who asks."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(AttentionClientError):
    """The server does not allow the call."""

    code = grpc.StatusCode.PERMISSION_DENIED


_CLASSES = {cls.code: cls for cls in AttentionClientError.__subclasses__()}


def invalid(field: str, expected: str, found: object) -> InvalidArgumentError:
    """The refusal of a call's argument, made before anything is sent."""
    message = f"{field}: expected {expected}; found {found}"
    return InvalidArgumentError(message, reason="INVALID_FIELD", field=field)


def from_rpc_error(error: grpc.RpcError) -> AttentionClientError:
    """Translates a failed call, with the google.rpc details that it carries."""
    code, message = error.code(), error.details() or ""
    reason = field = ""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # both kinds of RpcError are calls
    except ValueError:  # the details contradict the status they came with: they are not to be trusted
        status = None
    if status is not None:
        reason, field = _details(status)
    return _make(code, message, reason=reason, field=field)


def from_stream_error(error: pb.StreamError) -> AttentionClientError:
    """Translates the refusal of one request of a stream."""
    code = _CODES.get(error.code, grpc.StatusCode.UNKNOWN)
    return _make(code, error.message, reason=error.reason, field=error.field)


@contextmanager
def translated() -> Iterator[None]:
    """Turns a grpc.RpcError inside the block into the client's own."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def _make(code: grpc.StatusCode, message: str, *, reason: str, field: str) -> AttentionClientError:
    cls = _CLASSES.get(code, AttentionClientError)
    return cls(message or code.value[1], code=code, reason=reason, field=field)


def _details(status: status_pb2.Status) -> tuple[str, str]:
    """Reads the reason from ErrorInfo and the field from BadRequest's first violation."""
    reason = field = ""
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == _DOMAIN:
            reason = info.reason
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
    return reason, field
