"""Conversion of gRPC statuses to exceptions."""

import pickle

import grpc
import numpy as np
import pytest
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode, aio
from grpc_status import rpc_status

import attention_client as ac
from attention_client import AttendInputs
from attention_client._connection.streams import decode_response, encode_request
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import RequestOptions
from attention_client.errors import from_rpc_error, from_stream_error

# The code, the reason, and the class with its built-in base.
CLASSES = [
    (StatusCode.INVALID_ARGUMENT, "SOME", ac.InvalidArgumentError, ValueError),
    (StatusCode.NOT_FOUND, "SOME", ac.NotFoundError, Exception),
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
INFO = error_details_pb2.ErrorInfo(reason="SOME", domain="attention.v1")
FOREIGN = error_details_pb2.ErrorInfo(reason="QUOTA", domain="proxy.example")
BAD_REQUEST = error_details_pb2.BadRequest(
    field_violations=[error_details_pb2.BadRequest.FieldViolation(field=name) for name in ("query", "key")]
)
RETRY = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000))
TRAILING = ("x-request-id", "mine")


def rpc_error(
    *details: Message, code: StatusCode = StatusCode.NOT_FOUND, message: str = "m", claimed: str = ""
):
    """The error of a call that ended with a rich status, and with the identifier of the server's log."""
    status = status_pb2.Status(code=code.value[0], message=claimed or message)
    for detail in details:
        status.details.add().Pack(detail)
    trailing = aio.Metadata(*rpc_status.to_status(status).trailing_metadata, TRAILING)
    return aio.AioRpcError(code, aio.Metadata(), trailing, details=message)


@pytest.mark.parametrize(("code", "reason", "cls", "base"), CLASSES)
def test_each_status_has_its_class_in_calls_in_streams_and_across_processes(
    code: StatusCode, reason: str, cls: type[ac.AttentionClientError], base: type[Exception]
):
    info = error_details_pb2.ErrorInfo(reason=reason, domain="attention.v1")
    called = from_rpc_error(rpc_error(info, BAD_REQUEST, code=code))
    streamed = from_stream_error(
        pb.StreamError(code=code.value[0], reason=reason, message="m", field="query")
    )
    for error in (called, streamed, pickle.loads(pickle.dumps(called))):  # noqa: S301
        assert type(error) is cls
        assert isinstance(error, base)
        assert (error.code, error.reason, error.field) == (code, reason, "query")
        assert error.message == str(error) == "m"


@pytest.mark.parametrize(
    ("error", "reason", "field", "retry_after"),
    [
        pytest.param(rpc_error(FOREIGN), "", "", None, id="another-domain"),
        pytest.param(rpc_error(RETRY, BAD_REQUEST, INFO), "SOME", "query", 1.5, id="any-order"),
        pytest.param(rpc_error(INFO, claimed="other"), "", "", None, id="contradicting"),
    ],
)
def test_details_of_the_servers_domain_are_read(
    error: grpc.RpcError, reason: str, field: str, retry_after: float | None
):
    found = from_rpc_error(error)
    assert (type(found), found.message, found.request_id) == (ac.NotFoundError, "m", "mine")
    assert (found.reason, found.field, found.retry_after) == (reason, field, retry_after)


def test_a_stream_reads_the_answer_to_its_request_only():
    call = encode_request(AttendInputs(np.ones((1, 1))), RequestOptions(model="m"))
    with pytest.raises(ac.InternalError, match="'3'"):
        decode_response(pb.AttendStreamResponse(id="3"), 4, call)
    for answer, cls in (
        (pb.AttendStreamResponse(id="4", error=pb.StreamError(code=3)), ac.InvalidArgumentError),
        (pb.AttendStreamResponse(id="4", error=pb.StreamError(code=999)), ac.AttentionClientError),
        (pb.AttendStreamResponse(id="4"), ac.InternalError),
    ):
        assert type(decode_response(answer, 4, call)) is cls
