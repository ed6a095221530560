"""Streams of inference: one reply for each request, in their order. A request that fails does not end one."""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeAlias

from google.protobuf.message import Message

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import OverloadedError
from attention_serving.server.engine.types import Result
from attention_serving.server.rpc.calls.deferred import DeferredReply
from attention_serving.server.rpc.calls.ending import engine_error_of
from attention_serving.server.rpc.known_requests import Recalled
from attention_serving.server.rpc.notes import note_failure
from attention_serving.server.rpc.open_inference import parameters
from attention_serving.server.rpc.protobuf_bytes import Parsed, field
from attention_serving.server.rpc.transport.seam import Call

RESPONSE = (pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER,)
IS_FINAL = "triton_final_response"
# The parameter of a response that is the only one to its request, if the client wants to know.
FINAL = pb.ModelInferResponse(parameters={IS_FINAL: pb.InferParameter(bool_param=True)}).SerializeToString()
InferRequest: TypeAlias = Parsed[pb.ModelInferRequest] | Recalled[Any]
Infer = Callable[[InferRequest, Call, Reservation], DeferredReply]


def answer(
    infer: Infer, request: InferRequest, call: Call, reservation: Reservation
) -> DeferredReply | pb.ModelStreamInferResponse:
    """Answers one request of a stream as `infer` answers a call of its own."""
    if isinstance(request, Recalled):
        request_id, wants_final = request.request_id, request.known.reply.wants_final
    else:
        request_id, wants_final = request.message.id, parameters.wants_final(request.message.parameters)
    try:
        reply = infer(request, call, reservation)
    except Exception as error:
        note_failure(reservation, error)
        return _failed(request_id, error)

    def encode(resolved: Future[Result]) -> bytes | pb.ModelStreamInferResponse:
        try:
            response = _serialized(reply.encode(resolved))
        except CancelledError:  # the call has ended
            raise
        except Exception as error:
            return _failed(request_id, error)
        return b"".join(field(RESPONSE, [FINAL if wants_final else b"", response]))

    return DeferredReply(reply.future, encode, reply.deadline)


def _serialized(reply: Message | bytes) -> bytes:
    return reply if isinstance(reply, bytes) else reply.SerializeToString()


def refuse(_message: bytes, error: OverloadedError) -> pb.ModelStreamInferResponse:
    """Answers a request that is not parsed, because there is no memory for it."""
    return _failed("", error)


def _failed(request_id: str, error: Exception) -> pb.ModelStreamInferResponse:
    """The reply to a request that failed."""
    return pb.ModelStreamInferResponse(
        error_message=engine_error_of(error).message, infer_response=pb.ModelInferResponse(id=request_id)
    )
