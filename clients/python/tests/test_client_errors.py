"""Conversion of gRPC statuses to exceptions."""

import pickle

import grpc
import numpy as np
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode, aio
from grpc_status import rpc_status

import attention_client as ac
from attention_client import AttendInputs
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._streaming import decode_response, encode_item
from attention_client._values import RequestOptions
from attention_client.errors import from_rpc_error, from_stream_error

# The code, the reason, and the class with its built-in base.
CLASSES = [
    (StatusCode.INVALID_ARGUMENT, "SOME", ac.InvalidArgumentError, ValueError),
    (StatusCode.NOT_FOUND, "SOME", ac.NotFoundError, Exception),
    (StatusCode.FAILED_PRECONDITION, "SOME", ac.FailedPreconditionError, Exception),
    (StatusCode.RESOURCE_EXHAUSTED, "SOME", ac.ResourceExhaustedError, Exception),
    (StatusCode.DEADLINE_EXCEEDED, "SOME", ac.DeadlineExceededError, TimeoutError),
    (StatusCode.UNAVAILABLE, "SOME", ac.UnavailableError, ConnectionError),
    (StatusCode.CANCELLED, "SOME", ac.CallCancelledError, Exception),
    (StatusCode.INTERNAL, "OVERLOADED", ac.InternalError, Exception),
    (StatusCode.UNAUTHENTICATED, "SOME", ac.UnauthenticatedError, Exception),
    (StatusCode.PERMISSION_DENIED, "SOME", ac.PermissionDeniedError, Exception),
    (StatusCode.UNIMPLEMENTED, "SOME", ac.AttentionClientError, Exception),
    (StatusCode.INVALID_ARGUMENT, "LIMIT_EXCEEDED", ac.LimitExceededError, ValueError),
    (StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", ac.OverloadedError, Exception),
    (StatusCode.RESOURCE_EXHAUSTED, "IDENTITY_LIMIT", ac.OverloadedError, Exception),
]
FOREIGN = error_details_pb2.ErrorInfo(reason="QUOTA", domain="proxy.example")
VIOLATION = error_details_pb2.BadRequest.FieldViolation
BAD_REQUEST = error_details_pb2.BadRequest(
    field_violations=[VIOLATION(field=name) for name in ("query", "key")]
)


def info(reason: str = "SOME"):
    return error_details_pb2.ErrorInfo(reason=reason, domain="attention.v1")


def rpc_error(code: StatusCode, message: str, *details: Message, claimed: str | None = None):
    """The error of a call that ended with a rich status."""
    status = status_pb2.Status(code=code.value[0], message=claimed or message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailing = aio.Metadata(*rpc_status.to_status(status).trailing_metadata)
    return aio.AioRpcError(code, aio.Metadata(), trailing, details=message)


@pytest.mark.parametrize(("code", "reason", "cls", "base"), CLASSES)
def test_each_status_has_its_class_in_calls_in_streams_and_across_processes(
    code: StatusCode, reason: str, cls: type[ac.AttentionClientError], base: type[Exception]
):
    called = from_rpc_error(rpc_error(code, "why", info(reason), BAD_REQUEST))
    streamed = from_stream_error(
        pb.StreamError(code=code.value[0], reason=reason, message="why", field="query")
    )
    for error in (called, streamed, pickle.loads(pickle.dumps(called))):  # noqa: S301
        assert type(error) is cls
        assert isinstance(error, base)
        assert (error.code, error.reason, error.field) == (code, reason, "query")
        assert error.message == str(error) == "why"


@pytest.mark.parametrize(
    ("error", "reason", "field"),
    [
        pytest.param(rpc_error(StatusCode.NOT_FOUND, "m", FOREIGN), "", "", id="another-domain"),
        pytest.param(
            rpc_error(StatusCode.NOT_FOUND, "m", BAD_REQUEST, info()), "SOME", "query", id="any-order"
        ),
        pytest.param(
            rpc_error(StatusCode.NOT_FOUND, "m", info(), claimed="other"), "", "", id="contradicting"
        ),
        pytest.param(
            aio.AioRpcError(StatusCode.NOT_FOUND, aio.Metadata(), aio.Metadata(), details="m"),
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
    for details, seconds in (((retry, info("OVERLOADED")), 1.5), ((info("OVERLOADED"),), None)):
        error = from_rpc_error(rpc_error(StatusCode.RESOURCE_EXHAUSTED, "full", *details))
        assert (type(error), error.retry_after) == (ac.OverloadedError, seconds)


def test_a_status_without_a_message_gets_one():
    assert str(from_rpc_error(rpc_error(StatusCode.NOT_FOUND, ""))) == "not found"


def test_an_error_has_the_request_id_of_the_servers_log() -> None:
    trailing = aio.Metadata(("x-request-id", "mine"), ("other", "else"))
    too_large = "SERVER: Received message larger than max (9 vs. 5)"
    for code, details in ((StatusCode.NOT_FOUND, "m"), (StatusCode.RESOURCE_EXHAUSTED, too_large)):
        status = aio.AioRpcError(code, aio.Metadata(), trailing, details=details)
        assert from_rpc_error(status).request_id == "mine"


def test_a_stream_reads_the_answer_to_its_request_only():
    sent, _ = encode_item(4, AttendInputs(np.ones((1, 1))), RequestOptions(model="m"))
    with pytest.raises(ac.InternalError, match="'3'"):
        decode_response(pb.AttendStreamResponse(id="3"), sent)
    for answer, cls in (
        (pb.AttendStreamResponse(id="4", error=pb.StreamError(code=3)), ac.InvalidArgumentError),
        (pb.AttendStreamResponse(id="4", error=pb.StreamError(code=999)), ac.AttentionClientError),
        (pb.AttendStreamResponse(id="4"), ac.InternalError),
    ):
        assert type(decode_response(answer, sent)) is cls
