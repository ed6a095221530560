"""The methods of attention.v1."""

from typing import Any, ClassVar

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.attention import codec, named_tensors
from attention_serving.server.api.attention.model_codec import describe
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.errors import code_of, engine_error_of
from attention_serving.server.api.inference import Inference
from attention_serving.server.api.method import Method, find_model, of_service, readable
from attention_serving.server.api.protobuf_bytes import Parsed, field, leading_text, text_field
from attention_serving.server.api.tensors import Allowance, Reply
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validation import encode_texts
from attention_serving.server.engine.types import Request, Result
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

SERVICE = pb.DESCRIPTOR.services_by_name["AttentionService"]
# A response contains the id of its request.
MAX_ID_BYTES = 1024
ID, RESPONSE = pb.AttendStreamResponse.ID_FIELD_NUMBER, (pb.AttendStreamResponse.RESPONSE_FIELD_NUMBER,)


class Attend(Inference):
    """Computes the context vectors of one request."""

    kind: ClassVar[Any] = pb.AttendRequest
    paths = codec.PATHS

    def _is_slow(self, parsed: Parsed[Any]) -> bool:
        return codec.is_slow(parsed)

    def _decode(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[Request, Reply]:
        message, wire = parsed.message, codec.output_type(parsed.message)
        if message.inputs:
            return named_tensors.decode(parsed, model, deadline, allowance, wire)
        embeds, has_texts = message.HasField("embedding"), message.HasField("text")
        if embeds and model.encoder is None:
            raise InvalidRequestError("embedding", f"model {model.name!r} is not a text encoder")
        request = codec.decode(parsed, codec.input_names(model), deadline, allowance)
        request = encode_texts(request, model, allowance.limits, allowance.reservation)
        known = codec.facts(request, model, has_texts=has_texts)
        return request, codec.reply(known, model, wire, embeds=embeds)

    def _encode(self, reply: Reply, result: Result, request_id: str) -> bytes:
        return b"".join(reply.parts(result))


class AttendStream(Attend):
    """Answers one request of a stream."""

    kind, within, is_stream = pb.AttendStreamRequest, "request", True

    def _decode(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[Request, Reply]:
        if (size := len(parsed.id.encode())) > MAX_ID_BYTES:
            raise LimitExceededError("id", f"has {size} bytes; the limit is {MAX_ID_BYTES}")
        return super()._decode(parsed, model, deadline, allowance)

    def _encode(self, reply: Reply, result: Result, request_id: str) -> bytes:
        return b"".join([text_field(ID, request_id), *field(RESPONSE, reply.parts(result))])

    def _leading_id(self, message: bytes) -> str:
        return leading_text(message, pb.AttendStreamRequest.ID_FIELD_NUMBER)

    def _failed(self, request_id: str, error: Exception) -> bytes:
        shown = engine_error_of(error)
        stream_error = pb.StreamError(
            code=code_of(shown).value[0], reason=shown.reason, message=shown.message, field=shown.field
        )
        return pb.AttendStreamResponse(id=request_id[:MAX_ID_BYTES], error=stream_error).SerializeToString()


def methods(engine: Engine, threads: CodecThreads) -> dict[str, Method]:
    """Each method by its full name.

    Args:
        engine: Computes results.
        threads: Decode and encode what is large.
    """
    repository = engine.repository

    def list_models(_request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        """Describes the models that the caller may read, those that failed to load included."""
        return pb.ListModelsResponse(models=map(describe, readable(repository, call)))

    def get_model(request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        model = find_model(repository.find, call, Right.READ, request.name, request.version)
        return pb.GetModelResponse(model=describe(model))

    return {
        f"/{SERVICE.full_name}/Attend": Attend(engine, threads).method(),
        f"/{SERVICE.full_name}/AttendStream": AttendStream(engine, threads).method(),
        **of_service(SERVICE, Right.READ, ListModels=list_models, GetModel=get_model),
    }
