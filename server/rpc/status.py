"""The one mapping of the engine's errors to gRPC statuses."""

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from server.engine.errors import EngineError

DOMAIN = "attention.v1"
UNEXPECTED = "the server failed unexpectedly; its log has the details"


def code_of(error: EngineError) -> grpc.StatusCode:
    """The gRPC code of an error. Its number is the google.rpc.Code."""
    return grpc.StatusCode[error.code.name]


def status_of(error: EngineError) -> status_pb2.Status:
    """A google.rpc.Status with ErrorInfo, and with BadRequest if the error names a field."""
    details = [_packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    return status_pb2.Status(code=code_of(error).value[0], message=error.message, details=details)


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
