"""Errors as HTTP answers: the one mapping of statuses.

HttpError                   an answer other than 200, with its message
├── BackendError            the gRPC server refused the call, or cannot be reached
└── TooLargeError           the body exceeds the limit
ClientDisconnectedError     the client left; nobody reads an answer
"""

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import grpc
import orjson
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from starlette.responses import Response

from attention_serving.server.api.errors import DETAILS_KEY
from attention_serving.server.engine.errors import Code, EngineError, OverloadedError

Headers = Mapping[str, str]
CLOSE: Headers = {"connection": "close"}
# gRPC codes, by the status that clients of HTTP know for the same. Source: google/rpc/code.proto.
STATUSES = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
# When to try again if the gRPC server does not say, in seconds.
RETRY_SECONDS = 1
RETRIED = (429, 503)
# Headers that a status must have.
STATUS_HEADERS: dict[int, Headers] = {401: {"www-authenticate": "Bearer"}}


class HttpError(Exception):
    """An answer other than 200.

    Attributes:
        status: The HTTP status.
        message: The text for people.
        headers: Headers of the answer.
    """

    def __init__(self, status: int, message: str, headers: Headers | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})


class TooLargeError(HttpError):
    """The body is larger than this server takes."""

    def __init__(self, message: str) -> None:
        super().__init__(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


class BackendError(HttpError):
    """The gRPC server ended a call with a status other than OK."""


class ClientDisconnectedError(Exception):
    """The client closed the connection before its answer was ready."""


def of_call(error: grpc.aio.AioRpcError) -> BackendError:
    """The answer to a call that failed."""
    status = STATUSES.get(error.code().name, HTTPStatus.INTERNAL_SERVER_ERROR)
    headers = dict(STATUS_HEADERS.get(status, {}))
    if status in RETRIED:
        headers["retry-after"] = str(_retry_seconds(error))
    return BackendError(status, error.details() or error.code().name, headers)


def of_engine(error: EngineError) -> HttpError:
    """The answer to a request that this process refuses itself."""
    if isinstance(error, OverloadedError):
        headers = {"retry-after": str(max(1, math.ceil(error.retry_after)))}
        return HttpError(HTTPStatus.SERVICE_UNAVAILABLE, error.message, headers)
    status = HTTPStatus.BAD_REQUEST if error.code is Code.INVALID_ARGUMENT else 500
    return HttpError(status, error.message)


def page(error: HttpError, *, close: bool = False) -> Response:
    """The answer {"error": "..."}.

    Args:
        error: What went wrong.
        close: Whether the connection ends with the answer.
    """
    headers = {**error.headers, **(CLOSE if close else {})}
    return Response(body(error.message), error.status, headers, "application/json")


def body(message: str) -> bytes:
    """The JSON of an error."""
    return orjson.dumps({"error": message})


def _retry_seconds(error: grpc.aio.AioRpcError) -> int:
    """Whole seconds of google.rpc.RetryInfo, at least 1."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            return max(RETRY_SECONDS, math.ceil(_retry_delay(value)))
    return RETRY_SECONDS


def _retry_delay(value: Any) -> float:
    try:
        details = status_pb2.Status.FromString(value).details
    except DecodeError:
        return 0.0
    retry = error_details_pb2.RetryInfo()
    for detail in details:
        if detail.Unpack(retry):
            seconds: float = retry.retry_delay.ToMicroseconds() / 1e6
            return seconds
    return 0.0
