"""Exceptions raised by the client.

AttentionClientError
├── InvalidArgumentError      (ValueError)       an argument is wrong, found by the client or by the server
│   └── LimitExceededError                       larger than a limit, which the message states
│       └── MessageTooLargeError                 larger than a message may be; also a ResourceExhaustedError
├── NotFoundError                                the server does not have this model, version or context
├── FailedPreconditionError                      the model exists but cannot answer, or not this call
│   └── ModelChangedError                        another model of the same name and version has answered
├── ResourceExhaustedError                       the server lacks a resource that the call needs
│   └── OverloadedError                          the server's queue is full: call again later
├── DeadlineExceededError     (TimeoutError)     the call's timeout passed before its result arrived
├── UnavailableError          (ConnectionError)  no server could be reached, or the connection broke
├── CallCancelledError                           the call was cancelled
│   └── ClientClosedError                        the client was closed before or during the call
├── InternalError                                the server failed, or its response cannot be read
├── UnauthenticatedError                         the server does not accept the caller's credentials
└── PermissionDeniedError                        the caller may not make this call

A status without a class of its own, such as UNIMPLEMENTED, is an AttentionClientError.
"""

from collections.abc import Mapping
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from attention_client._generated.attention.v1 import attention_pb2 as pb

_DOMAIN = "attention.v1"
# What the server's log calls a call, in the metadata that comes with its status.
_REQUEST_ID = "x-request-id"
_CODES = {code.value[0]: code for code in grpc.StatusCode}
# A part of the message of gRPC's core, which states the sizes; and the settings that bound a message.
_TOO_LARGE = "message larger than max"
_LIMITS = (
    ". Put fewer or shorter sequences into a request, or raise both limits: the client's max_message_bytes "
    "and the server's --max-message-bytes"
)


class AttentionClientError(Exception):
    """A call that has no result.

    Attributes:
        message: What was given, what is allowed and what to do, for people.
        code: The gRPC status code; for an error found by the client, the code of its class.
        reason: Short and stable, for programs, such as "LIMIT_EXCEEDED"; empty if the server gave none.
        field: The argument or the request's field at fault; empty if none is.
        request_id: What the server's log calls the call; empty if the server did not say.
        retry_after: Seconds after which the server suggests to repeat the call, 0 or more; None if it
            suggests nothing.
        model_digest: Digest of the model that refused the call; empty if none did.
    """

    code: grpc.StatusCode | None = None

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        field: str = "",
        request_id: str = "",
        retry_after: float | None = None,
        model_digest: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code if code is not None else type(self).code
        self.reason = reason
        self.field = field
        self.request_id = request_id
        self.retry_after = retry_after
        self.model_digest = model_digest


class InvalidArgumentError(AttentionClientError, ValueError):
    """An argument is wrong, and repeating the call does not help; `field` names the argument."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class LimitExceededError(InvalidArgumentError):
    """The request is larger than a limit of the server or of the client; the message states the limit."""


class NotFoundError(AttentionClientError):
    """The server does not have this model, this version of it or this context."""

    code = grpc.StatusCode.NOT_FOUND


class FailedPreconditionError(AttentionClientError):
    """The model exists but cannot answer, or cannot answer this kind of call."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ModelChangedError(FailedPreconditionError):
    """The answers of one call or stream, or those of several servers, are of different models.

    A version was replaced, or the servers have different artifacts under one name and version.
    """


class ResourceExhaustedError(AttentionClientError):
    """The server lacks a resource that the call needs."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class OverloadedError(ResourceExhaustedError):
    """The server's queue is full, or the caller holds its share; the same call may succeed later."""


class MessageTooLargeError(ResourceExhaustedError, LimitExceededError):
    """A request or a response exceeds the largest message that the client or the server accepts."""


class DeadlineExceededError(AttentionClientError, TimeoutError):
    """The call's timeout passed before its result arrived."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class UnavailableError(AttentionClientError, ConnectionError):
    """No server could be reached, or the connection broke; the call may be repeated."""

    code = grpc.StatusCode.UNAVAILABLE


class CallCancelledError(AttentionClientError):
    """The call was cancelled."""

    code = grpc.StatusCode.CANCELLED


class ClientClosedError(CallCancelledError):
    """The client was closed before or during the call."""


class InternalError(AttentionClientError):
    """The server failed, or its response cannot be read."""

    code = grpc.StatusCode.INTERNAL


class UnauthenticatedError(AttentionClientError):
    """The server does not accept the caller's credentials."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(AttentionClientError):
    """The caller is known and may not make this call."""

    code = grpc.StatusCode.PERMISSION_DENIED


_BY_CODE = {cls.code: cls for cls in AttentionClientError.__subclasses__()}
# The server's reasons that have a class of their own.
_BY_REASON: dict[tuple[grpc.StatusCode, str], type[AttentionClientError]] = {
    (grpc.StatusCode.INVALID_ARGUMENT, "LIMIT_EXCEEDED"): LimitExceededError,
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"): OverloadedError,
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "IDENTITY_LIMIT"): OverloadedError,
}


def invalid(field: str, expected: str, actual: object) -> InvalidArgumentError:
    """The error for a wrong argument, raised before anything is sent."""
    message = f"{field}: expected {expected}; found {actual}"
    return InvalidArgumentError(message, reason="INVALID_FIELD", field=field)


def from_rpc_error(error: grpc.RpcError) -> AttentionClientError:
    """Converts the error of a call, including its google.rpc details."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # both kinds of RpcError are calls
    except ValueError:  # the details contradict the call's status and cannot be trusted
        status = None
    details = {} if status is None else _details(status)
    metadata: Any = error.trailing_metadata() or ()  # the stubs know only one of two kinds
    request_id = next((value for key, value in metadata if key == _REQUEST_ID), "")
    return _make(error.code(), error.details() or "", details, request_id=request_id)


def from_stream_error(error: pb.StreamError) -> AttentionClientError:
    """Converts the error of one request of a stream."""
    code = _CODES.get(error.code, grpc.StatusCode.UNKNOWN)
    return _make(code, error.message, {"reason": error.reason, "field": error.field})


def _make(
    code: grpc.StatusCode, message: str, details: Mapping[str, Any], *, request_id: str = ""
) -> AttentionClientError:
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in message:
        return MessageTooLargeError(message + _LIMITS, reason="MESSAGE_TOO_LARGE", request_id=request_id)
    cls = _BY_REASON.get((code, details.get("reason", ""))) or _BY_CODE.get(code, AttentionClientError)
    return cls(message or code.value[1], code=code, request_id=request_id, **details)


def _details(status: status_pb2.Status) -> dict[str, Any]:
    """Reads the reason of ErrorInfo, the field of BadRequest's first violation, and RetryInfo."""
    values: dict[str, Any] = {}
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == _DOMAIN:
            values["reason"], values["model_digest"] = info.reason, info.metadata.get("model_digest", "")
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            values["field"] = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            values["retry_after"] = max(retry.retry_delay.ToTimedelta().total_seconds(), 0.0)
    return values
