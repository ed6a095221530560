"""Conversion of gRPC statuses to exceptions."""

import pickle

import grpc
import numpy as np
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_status import rpc_status

import attention_client as ac
from attention_client import AttendInputs
from attention_client._encoding import encode_vectors
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._streaming import SentRequest, decode_response
from attention_client._values import RequestOptions
from attention_client.errors import from_rpc_error, from_stream_error

CLASSES = [
    (grpc.StatusCode.INVALID_ARGUMENT, ac.InvalidArgumentError, ValueError),
    (grpc.StatusCode.NOT_FOUND, ac.NotFoundError, Exception),
    (grpc.StatusCode.FAILED_PRECONDITION, ac.FailedPreconditionError, Exception),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, ac.ResourceExhaustedError, Exception),
    (grpc.StatusCode.DEADLINE_EXCEEDED, ac.DeadlineExceededError, TimeoutError),
    (grpc.StatusCode.UNAVAILABLE, ac.UnavailableError, ConnectionError),
    (grpc.StatusCode.CANCELLED, ac.CallCancelledError, Exception),
    (grpc.StatusCode.INTERNAL, ac.InternalError, Exception),
    (grpc.StatusCode.UNAUTHENTICATED, ac.UnauthenticatedError, Exception),
    (grpc.StatusCode.PERMISSION_DENIED, ac.PermissionDeniedError, Exception),
    (grpc.StatusCode.UNIMPLEMENTED, ac.AttentionClientError, Exception),
]
IDS = [code.name for code, _, _ in CLASSES]
INFO = error_details_pb2.ErrorInfo(reason="SOME_REASON", domain="attention.v1")
FOREIGN = error_details_pb2.ErrorInfo(reason="QUOTA", domain="proxy.example")
VIOLATION = error_details_pb2.BadRequest.FieldViolation
BAD_REQUEST = error_details_pb2.BadRequest(
    field_violations=[VIOLATION(field=name) for name in ("query", "key")]
)


def rpc_error(code: grpc.StatusCode, message: str, *details: Message, claimed: str | None = None):
    """The error of a call that ended with a rich status."""
    status = status_pb2.Status(code=code.value[0], message=claimed or message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailing = aio.Metadata(*rpc_status.to_status(status).trailing_metadata)
    return aio.AioRpcError(code, aio.Metadata(), trailing, details=message)


def not_found(*details: Message, claimed: str | None = None):
    return rpc_error(grpc.StatusCode.NOT_FOUND, "m", *details, claimed=claimed)


def answer_with_error(code: int):
    return pb.AttendStreamResponse(id="4", error=pb.StreamError(code=code))


@pytest.mark.parametrize(("code", "cls", "base"), CLASSES, ids=IDS)
def test_each_status_has_its_class(
    code: grpc.StatusCode, cls: type[ac.AttentionClientError], base: type[Exception]
):
    error = from_rpc_error(rpc_error(code, "too many rows", INFO, BAD_REQUEST))
    assert type(error) is cls
    assert isinstance(error, base)
    assert (error.code, error.reason, error.field) == (code, "SOME_REASON", "query")
    assert error.message == str(error) == "too many rows"


@pytest.mark.parametrize(("code", "cls", "base"), CLASSES, ids=IDS)
def test_an_error_within_a_stream_is_the_same(
    code: grpc.StatusCode, cls: type[ac.AttentionClientError], base: type[Exception]
):
    error = from_stream_error(pb.StreamError(code=code.value[0], reason="R", message="why", field="mask"))
    assert type(error) is cls
    assert isinstance(error, base)
    assert (error.code, error.reason, error.field, error.message) == (code, "R", "mask", "why")


REASONS = [
    pytest.param(grpc.StatusCode.INVALID_ARGUMENT, "LIMIT_EXCEEDED", ac.LimitExceededError, id="limit"),
    pytest.param(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", ac.OverloadedError, id="overloaded"),
    pytest.param(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "IDENTITY_LIMIT", ac.OverloadedError, id="share-of-an-identity"
    ),
    pytest.param(grpc.StatusCode.RESOURCE_EXHAUSTED, "OTHER", ac.ResourceExhaustedError, id="other-reason"),
    pytest.param(grpc.StatusCode.INTERNAL, "OVERLOADED", ac.InternalError, id="reason-of-another-code"),
]


@pytest.mark.parametrize(("code", "reason", "cls"), REASONS)
def test_a_reason_selects_the_class(code: grpc.StatusCode, reason: str, cls: type[ac.AttentionClientError]):
    info = error_details_pb2.ErrorInfo(reason=reason, domain="attention.v1")
    for error in (
        from_rpc_error(rpc_error(code, "why", info)),
        from_stream_error(pb.StreamError(code=code.value[0], reason=reason, message="why")),
    ):
        assert type(error) is cls
        assert (error.code, error.reason) == (code, reason)


def test_the_docstring_shows_every_exception():
    tree = ac.errors.__doc__
    classes = [ac.AttentionClientError]
    for cls in classes:
        classes += cls.__subclasses__()
        assert cls.__name__ in tree
        assert getattr(ac, cls.__name__) is cls


def test_a_message_that_is_too_large_crosses_process_boundaries():
    error = from_rpc_error(
        rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (7 vs. 5)")
    )
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is ac.MessageTooLargeError
    assert copy.message == error.message
    assert "the request is 7 bytes; the server allows 5" in copy.message


@pytest.mark.parametrize(
    ("error", "reason", "field"),
    [
        pytest.param(not_found(), "", "", id="no-details"),
        pytest.param(not_found(FOREIGN), "", "", id="another-domain"),
        pytest.param(
            not_found(BAD_REQUEST, INFO),
            "SOME_REASON",
            "query",
            id="any-order",
        ),
        pytest.param(not_found(INFO, claimed="other"), "", "", id="contradicting"),
        pytest.param(
            aio.AioRpcError(grpc.StatusCode.NOT_FOUND, aio.Metadata(), aio.Metadata(), details="m"),
            "",
            "",
            id="no-rich-status",
        ),
    ],
)
def test_details_of_the_servers_domain_are_read(error: grpc.RpcError, reason: str, field: str):
    translated = from_rpc_error(error)
    assert isinstance(translated, ac.NotFoundError)
    assert (translated.message, translated.reason, translated.field) == ("m", reason, field)


def test_an_overloaded_server_says_when_to_repeat_the_call():
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    info = error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="attention.v1")
    error = from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry, info))
    assert isinstance(error, ac.OverloadedError)
    assert (error.retry_after, error.reason) == (1.5, "OVERLOADED")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert copy.retry_after == 1.5
    assert from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", info)).retry_after is None


def test_a_status_without_a_message_gets_one():
    assert str(from_rpc_error(rpc_error(grpc.StatusCode.NOT_FOUND, ""))) == "not found"


@pytest.mark.parametrize(("code", "cls", "base"), CLASSES, ids=IDS)
def test_errors_cross_process_boundaries(
    code: grpc.StatusCode, cls: type[ac.AttentionClientError], base: type[Exception]
):
    error = pickle.loads(pickle.dumps(from_rpc_error(rpc_error(code, "why", INFO, BAD_REQUEST))))  # noqa: S301
    assert type(error) is cls
    assert isinstance(error, base)
    assert (error.message, error.code, error.reason, error.field) == ("why", code, "SOME_REASON", "query")


@pytest.fixture
def sent():
    return SentRequest(
        "4", encode_vectors(RequestOptions(model="m"), AttendInputs(np.ones((1, 1)))).response_shape
    )


def test_a_stream_refuses_the_response_to_another_request(sent: SentRequest):
    with pytest.raises(ac.InternalError, match="'3'"):
        decode_response(pb.AttendStreamResponse(id="3"), sent)


@pytest.mark.parametrize(
    ("answer", "cls"),
    [
        pytest.param(
            answer_with_error(3),
            ac.InvalidArgumentError,
            id="refused",
        ),
        pytest.param(
            answer_with_error(999),
            ac.AttentionClientError,
            id="unknown-code",
        ),
        pytest.param(pb.AttendStreamResponse(id="4"), ac.InternalError, id="empty"),
    ],
)
def test_a_response_without_a_result_is_an_error_in_its_place(
    answer: pb.AttendStreamResponse, cls: type[ac.AttentionClientError], sent: SentRequest
):
    assert type(decode_response(answer, sent)) is cls


def test_an_error_has_the_request_id_of_the_servers_log() -> None:
    trailing = aio.Metadata(("x-request-id", "mine"), ("other", "else"))
    status = aio.AioRpcError(grpc.StatusCode.NOT_FOUND, aio.Metadata(), trailing, details="m")
    assert from_rpc_error(status).request_id == "mine"
    too_large = "SERVER: Received message larger than max (9 vs. 5)"
    status = aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, aio.Metadata(), trailing, details=too_large)
    assert from_rpc_error(status).request_id == "mine"
    assert from_rpc_error(not_found()).request_id == ""
