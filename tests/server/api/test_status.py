"""Every error of a request has a gRPC status."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from attention_serving.protos.attention.v1.attention_pb2 import AttendStreamResponse
from attention_serving.protos.inference.open_inference_pb2 import ModelStreamInferResponse
from attention_serving.server.api.admission import IdleStreamError, ReceiveTimeoutError
from attention_serving.server.api.attention.service import AttendStream
from attention_serving.server.api.errors import UNEXPECTED, code_of, trailing_metadata
from attention_serving.server.api.method import MalformedMessageError
from attention_serving.server.api.open_inference.service import ModelStreamInfer
from attention_serving.server.engine.errors import (
    RETRY_SECONDS,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    LimitExceededError,
    ModelNotFoundError,
    ModelNotReadyError,
    OverloadedError,
    RegionNotFoundError,
    RunFailedError,
    ShuttingDownError,
    UnsupportedError,
)
from attention_serving.server.security.rights import (
    CredentialsError,
    ExpiredTokenError,
    IdentityLimitError,
    InvalidTokenError,
    KeysUnavailableError,
    MissingCredentialsError,
    PermissionDeniedError,
)
from attention_serving.server.security.web_tokens import NotYetValidError, UnknownKeyError

EXPECTED = [
    (EngineError("m"), grpc.StatusCode.INTERNAL, 13, "INTERNAL"),
    (InvalidRequestError("key", "m"), grpc.StatusCode.INVALID_ARGUMENT, 3, "INVALID_FIELD"),
    (MalformedMessageError("message", "m"), grpc.StatusCode.INVALID_ARGUMENT, 3, "INVALID_FIELD"),
    (LimitExceededError("key", "m"), grpc.StatusCode.INVALID_ARGUMENT, 3, "LIMIT_EXCEEDED"),
    (ModelNotFoundError("m", field="model_name"), grpc.StatusCode.NOT_FOUND, 5, "MODEL_NOT_FOUND"),
    (ModelNotReadyError("m"), grpc.StatusCode.FAILED_PRECONDITION, 9, "MODEL_NOT_READY"),
    (RegionNotFoundError("m", field="key"), grpc.StatusCode.NOT_FOUND, 5, "REGION_NOT_FOUND"),
    (UnsupportedError("m"), grpc.StatusCode.UNIMPLEMENTED, 12, "UNSUPPORTED"),
    (OverloadedError("m"), grpc.StatusCode.RESOURCE_EXHAUSTED, 8, "OVERLOADED"),
    (DeadlineExceededError("m"), grpc.StatusCode.DEADLINE_EXCEEDED, 4, "DEADLINE_EXCEEDED"),
    (ShuttingDownError("m"), grpc.StatusCode.UNAVAILABLE, 14, "SHUTTING_DOWN"),
    (RunFailedError("m"), grpc.StatusCode.INTERNAL, 13, "RUN_FAILED"),
    (ReceiveTimeoutError("m"), grpc.StatusCode.DEADLINE_EXCEEDED, 4, "RECEIVE_TIMEOUT"),
    (IdleStreamError("m"), grpc.StatusCode.UNAVAILABLE, 14, "STREAM_IDLE"),
    (CredentialsError("m"), grpc.StatusCode.UNAUTHENTICATED, 16, "CREDENTIALS_INVALID"),
    (MissingCredentialsError("m"), grpc.StatusCode.UNAUTHENTICATED, 16, "CREDENTIALS_MISSING"),
    (InvalidTokenError("m"), grpc.StatusCode.UNAUTHENTICATED, 16, "TOKEN_INVALID"),
    (NotYetValidError("m"), grpc.StatusCode.UNAUTHENTICATED, 16, "TOKEN_INVALID"),
    (UnknownKeyError("m"), grpc.StatusCode.UNAUTHENTICATED, 16, "TOKEN_INVALID"),
    (ExpiredTokenError("m"), grpc.StatusCode.UNAUTHENTICATED, 16, "TOKEN_EXPIRED"),
    (PermissionDeniedError("m"), grpc.StatusCode.PERMISSION_DENIED, 7, "RIGHT_MISSING"),
    (KeysUnavailableError("m"), grpc.StatusCode.UNAVAILABLE, 14, "KEYS_UNAVAILABLE"),
    (IdentityLimitError("m"), grpc.StatusCode.RESOURCE_EXHAUSTED, 8, "IDENTITY_LIMIT"),
]


def status_of(error: EngineError) -> status_pb2.Status:
    ((_, value),) = trailing_metadata(error)
    return status_pb2.Status.FromString(value)


def subclasses(parent: type[EngineError]) -> Iterator[type[EngineError]]:
    for child in parent.__subclasses__():
        yield child
        yield from subclasses(child)


@pytest.mark.parametrize(
    ("error", "code", "number", "reason"), EXPECTED, ids=[type(row[0]).__name__ for row in EXPECTED]
)
def test_an_error_becomes_a_status_with_its_reason_and_field(
    error: EngineError, code: grpc.StatusCode, number: int, reason: str
) -> None:
    status = status_of(error)
    assert code_of(error) is code
    assert (status.code, status.message) == (number, error.message)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, "attention.v1")
    assert len(status.details) == (2 if error.field or isinstance(error, OverloadedError) else 1)
    if error.field:
        assert status.details[1].Unpack(bad)
        violations = [(violation.field, violation.description) for violation in bad.field_violations]
        assert violations == [(error.field, error.message)]


def test_every_error_is_listed_above() -> None:
    assert {type(row[0]) for row in EXPECTED} == {EngineError, *subclasses(EngineError)}


def test_an_overloaded_server_says_when_to_retry() -> None:
    retry = error_details_pb2.RetryInfo()
    for error, seconds in (
        (OverloadedError("full", retry_after=1.25), 1.25),
        (OverloadedError("full"), RETRY_SECONDS),
    ):
        assert status_of(error).details[1].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == 1000 * seconds


@pytest.mark.parametrize(
    ("kind", "reply"), [(AttendStream, AttendStreamResponse), (ModelStreamInfer, ModelStreamInferResponse)]
)
def test_an_unexpected_error_in_a_stream_reveals_no_details(kind: type[Any], reply: type[Any]) -> None:
    answer = reply.FromString(kind._failed(object.__new__(kind), "7", ValueError("a secret")))
    assert UNEXPECTED in str(answer)
    assert '"7"' in str(answer)
    assert "secret" not in str(answer)
