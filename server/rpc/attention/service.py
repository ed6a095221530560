"""attention.v1: the typed service."""

import logging
from concurrent.futures import CancelledError, Future

from protos.attention.v1 import attention_pb2 as pb
from server.engine.engine import Engine
from server.engine.errors import EngineError
from server.engine.model import LoadedModel
from server.engine.types import Result
from server.rpc.attention import codec
from server.rpc.attention.model_codec import describe
from server.rpc.calls import Later, reads
from server.rpc.completion_queue import Call
from server.rpc.protobuf_bytes import Blobs, Parsed
from server.rpc.status import UNEXPECTED, code_of

log = logging.getLogger(__name__)


class AttentionService:
    """Decodes, submits, encodes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @reads(codec.read)
    def Attend(self, request: Parsed[pb.AttendRequest], context: Call) -> Later:
        """One request, one answer."""
        model, future = self._submit(request.message, request.blobs, context.deadline)
        return Later(future, lambda resolved: codec.encode(resolved.result(), model))

    @reads(codec.read_streamed)
    def AttendStream(
        self, request: Parsed[pb.AttendStreamRequest], context: Call
    ) -> Later | pb.AttendStreamResponse:
        """One request of a stream; its failure takes its place and does not end the stream."""
        message = request.message
        try:
            model, future = self._submit(message.request, request.blobs, context.deadline)
        except Exception as error:
            return _refusal(message.id, error)
        return Later(future, lambda resolved: _encode_streamed(message.id, resolved, model))

    def _submit(
        self, message: pb.AttendRequest, blobs: Blobs, until: float
    ) -> tuple[LoadedModel, Future[Result]]:
        model = self._engine.model(message.model_name, message.model_version)
        data = {path[-2]: content for path, content in blobs}
        decoded = codec.decode(message, until, codec.roles(model), data)
        return model, self._engine.submit(model, decoded)

    def ListModels(self, request: pb.ListModelsRequest, context: Call) -> pb.ListModelsResponse:
        """Every model."""
        return pb.ListModelsResponse(models=[describe(model) for model in self._engine.repository])

    def GetModel(self, request: pb.GetModelRequest, context: Call) -> pb.GetModelResponse:
        """One model."""
        return pb.GetModelResponse(
            model=describe(self._engine.repository.find(request.name, request.version))
        )


def _encode_streamed(
    request_id: str, resolved: Future[Result], model: LoadedModel
) -> bytes | pb.AttendStreamResponse:
    try:
        return codec.encode_streamed(request_id, resolved.result(), model)
    except CancelledError:  # the caller left
        raise
    except Exception as error:
        return _refusal(request_id, error)


def _refusal(request_id: str, error: Exception) -> pb.AttendStreamResponse:
    """An error that nobody foresaw tells the log only."""
    if not isinstance(error, EngineError):
        log.error("stream request failed", exc_info=error)
        error = EngineError(UNEXPECTED)
    stream_error = pb.StreamError(
        code=code_of(error).value[0], reason=error.reason, message=error.message, field=error.field
    )
    return pb.AttendStreamResponse(id=request_id, error=stream_error)
