"""How a call ends with an error."""

import logging
from concurrent.futures import CancelledError

import grpc

from attention_serving.server.engine.errors import Code, EngineError
from attention_serving.server.rpc.status import UNEXPECTED, code_of, trailing_metadata
from attention_serving.server.rpc.transport.call import Call

log = logging.getLogger(__name__)


class CallError(Exception):
    """Ends a call with a status that the engine has no error for."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


def engine_error_of(error: Exception) -> EngineError:
    """What the caller of a stream is told of a failed request. The log describes what was unexpected."""
    if isinstance(error, EngineError):
        return error
    log.error("stream request failed", exc_info=error)
    return EngineError(UNEXPECTED)


def end_with(call: Call, error: BaseException) -> None:
    """Ends a call with the status of an error. An unexpected error is described in the log only."""
    match error:
        case EngineError():
            call.finish(code_of(error), error.message, trailing_metadata(error), reason=error.reason)
        case CallError():
            call.finish(error.code, error.details)
        case CancelledError():
            call.finish(grpc.StatusCode.CANCELLED, "the call was cancelled")
        case _:
            log.error("call failed", extra={"method": call.method}, exc_info=error)
            call.finish(grpc.StatusCode[Code.INTERNAL], UNEXPECTED)
