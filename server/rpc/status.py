"""The one mapping of the engine's errors to gRPC statuses."""

import math

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from server.engine.errors import EngineError, OverloadedError

DOMAIN = "attention.v1"
UNEXPECTED = "the server failed unexpectedly; its log has the details"


def code_of(error: EngineError) -> grpc.StatusCode:
    """The gRPC code of an error. Its number is the google.rpc.Code."""
    return grpc.StatusCode[error.code.name]


def status_of(error: EngineError) -> status_pb2.Status:
    """A google.rpc.Status with ErrorInfo.

    It has BadRequest if the error names a field, and RetryInfo if the server is overloaded.
    """
    details = [_packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, OverloadedError):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(1000 * error.retry_after))
        details.append(_packed(retry))
    return status_pb2.Status(code=code_of(error).value[0], message=error.message, details=details)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
