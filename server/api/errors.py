"""The one mapping of the engine's errors to gRPC statuses."""

import logging
import math
from concurrent.futures import CancelledError
from functools import lru_cache, partial

import grpc
from google.protobuf.any import pack  # type: ignore[import-not-found]
from google.rpc import error_details_pb2, status_pb2

from attention_serving.server.coroutines import Callback
from attention_serving.server.engine.errors import Code, EngineError, OverloadedError
from attention_serving.server.transport.call import Call, Metadata

log = logging.getLogger(__name__)
DOMAIN = "attention.v1"
# The key under which clients of gRPC look for a google.rpc.Status.
DETAILS_KEY = "grpc-status-details-bin"
CACHED_STATUSES = 1024
UNEXPECTED = "the server failed unexpectedly; its log has the details"


def code_of(error: EngineError) -> grpc.StatusCode:
    """The gRPC code of an error. Its number is the google.rpc.Code."""
    return grpc.StatusCode[error.code.name]


def trailing_metadata(error: EngineError) -> Metadata:
    """The trailing metadata that carries the google.rpc.Status of an error, with ErrorInfo.

    ErrorInfo has the digest of the model that refused the request, if one did. The status has BadRequest if
    the error names a field, and RetryInfo if the server is overloaded.
    """
    retry = math.ceil(1000 * error.retry_after) if isinstance(error, OverloadedError) else -1
    parts = code_of(error).value[0], error.reason, error.message, error.field, retry
    return ((DETAILS_KEY, _serialize_status(*parts, error.model_digest)),)


@lru_cache(maxsize=CACHED_STATUSES)
def _serialize_status(
    code: int, reason: str, message: str, field: str, retry_milliseconds: int, digest: str
) -> bytes:
    """The bytes of a status. Under overload the same few are sent again and again. -1 asks for no retry."""
    metadata = {"model_digest": digest} if digest else {}
    details = [pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))]
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if retry_milliseconds >= 0:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(retry_milliseconds)
        details.append(pack(retry))
    status = status_pb2.Status(code=code, message=message, details=details)
    data: bytes = status.SerializeToString()
    return data


def log_and_wrap_error(error: Exception) -> EngineError:
    """The error of a failed request of a stream, as its caller sees it. An unexpected one is logged."""
    if isinstance(error, EngineError):
        return error
    log.error("stream request failed", exc_info=error)
    return EngineError(UNEXPECTED)


def prepare_finish(call: Call, error: BaseException) -> Callback:
    """A function that ends a call with the status of an error, without keeping the error and its request.

    An unexpected error is described in the log only.
    """
    match error:
        case EngineError():
            trailing = trailing_metadata(error)
            return partial(call.finish, code_of(error), error.message, trailing, reason=error.reason)
        case CancelledError():
            return partial(call.finish, grpc.StatusCode.CANCELLED, "the call was cancelled")
        case _:
            log.error("call failed", extra={"method": call.method}, exc_info=error)
            return partial(call.finish, grpc.StatusCode[Code.INTERNAL], UNEXPECTED)


def finish_with_error(call: Call, error: BaseException) -> None:
    """Ends a call with the status of an error."""
    prepare_finish(call, error)()
