"""The handlers of attention.v1."""

from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.caller import ANYONE, Caller
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import LimitExceededError, OverloadedError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Request, Result
from attention_serving.server.rpc import model_rights
from attention_serving.server.rpc.attention import codec, named_tensors
from attention_serving.server.rpc.attention.codec import NO_FACTS, TextFacts
from attention_serving.server.rpc.attention.fields import KNOWN_FIELDS, KNOWN_STREAMED_FIELDS, STREAMED_ID
from attention_serving.server.rpc.attention.model_codec import describe
from attention_serving.server.rpc.calls.deferred import DeferredReply
from attention_serving.server.rpc.calls.ending import engine_error_of
from attention_serving.server.rpc.known_requests import Answered, KnownRequests, Recalled
from attention_serving.server.rpc.notes import note_failure, note_refusal
from attention_serving.server.rpc.protobuf_bytes import Fields, Parsed, leading_text
from attention_serving.server.rpc.status import code_of
from attention_serving.server.rpc.tensors import Allowance, WireFloat
from attention_serving.server.rpc.transport.seam import Call
from attention_serving.server.security.rights import Right

# A response contains the id of its request.
MAX_ID_BYTES = 1024


class _Reply(NamedTuple):
    """What encodes the reply to a request, beside its result."""

    wire: WireFloat
    facts: TextFacts
    embeds: bool
    outputs: named_tensors.NamedOutputs | None

    def encode(self, result: Result, model: LoadedModel, stream_id: str | None = None) -> bytes:
        """Serializes a result as an AttendResponse, or as an AttendStreamResponse with its id."""
        wire, facts, embeds, outputs = self
        if outputs is not None:
            return named_tensors.encode(result, model, outputs, wire, stream_id)
        if stream_id is None:
            return codec.encode(result, model, wire, facts, embeds=embeds)
        return codec.encode_streamed(stream_id, result, model, wire, facts, embeds=embeds)


RecalledAttend: TypeAlias = Recalled[_Reply]


class AttentionService:
    """Resolves the model, decodes, submits, encodes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known = KnownRequests[_Reply](engine, KNOWN_FIELDS, ())
        self._known_streamed = KnownRequests[_Reply](engine, KNOWN_STREAMED_FIELDS, STREAMED_ID)

    def recall(self, message: bytes) -> RecalledAttend | None:
        """The request of `attend` that a message is known to be."""
        return self._known.recall(message)

    def recall_streamed(self, message: bytes) -> RecalledAttend | None:
        """The request of `attend_stream` that a message is known to be."""
        return self._known_streamed.recall(message)

    def attend(
        self, request: Parsed[pb.AttendRequest] | RecalledAttend, call: Call, reservation: Reservation
    ) -> DeferredReply:
        """Computes the context vectors of one request."""
        if isinstance(request, Recalled):
            future, model, reply = self._submit_known(request, call, reservation)
        else:
            future, model, reply = self._submit(request.message, request, self._known, call, reservation)
        return DeferredReply(future, lambda resolved: reply.encode(resolved.result(), model))

    def attend_stream(
        self, request: Parsed[pb.AttendStreamRequest] | RecalledAttend, call: Call, reservation: Reservation
    ) -> DeferredReply | pb.AttendStreamResponse:
        """Answers one request of a stream. If it fails, an error takes its place and the stream goes on."""
        request_id = request.request_id if isinstance(request, Recalled) else request.message.id
        try:
            if isinstance(request, Recalled):
                future, model, reply = self._submit_known(request, call, reservation)
            else:
                _check_id(request_id)
                own = request.message.request
                future, model, reply = self._submit(own, request, self._known_streamed, call, reservation)
        except Exception as error:
            note_failure(reservation, error)
            return _error_reply(request_id, error)
        return DeferredReply(future, lambda resolved: _encode_streamed(request_id, resolved, model, reply))

    def refuse_streamed(self, message: bytes, error: OverloadedError) -> pb.AttendStreamResponse:
        """Answers a request of a stream that is not parsed, because there is no memory for it."""
        return _error_reply(leading_text(message, pb.AttendStreamRequest.ID_FIELD_NUMBER), error)

    def _submit(
        self,
        message: pb.AttendRequest,
        parsed: Parsed[Any],
        known: KnownRequests[_Reply],
        call: Call,
        reservation: Reservation,
    ) -> tuple[Future[Result], LoadedModel, _Reply]:
        """Submits a request that is not known; `parsed` is what it was received in."""
        named = codec.model_of(message)
        model = model_rights.model_to_infer(self._engine, call, *named)
        try:
            request, reply = self._decoded(model, message, parsed.fields, call, reservation)
            validated = self._engine.validate(model, request)
            answered = Answered(named, request, validated, reply)
            known.learn(parsed.data, answered, partial(codec.inputs_of, message, model))
            return self._engine.queue(validated, reservation), model, reply
        except Exception as error:
            note_refusal(self._engine, reservation, model, error)
            raise

    def _submit_known(
        self, request: RecalledAttend, call: Call, reservation: Reservation
    ) -> tuple[Future[Result], LoadedModel, _Reply]:
        model = request.model
        model_rights.require(call, Right.INFER, model.name)
        try:
            validated = request.request(call.deadline, _caller_of(call))
            return self._engine.queue(validated, reservation), model, request.known.reply
        except Exception as error:
            note_refusal(self._engine, reservation, model, error)
            raise

    def _decoded(
        self,
        model: LoadedModel,
        message: pb.AttendRequest,
        fields: Fields,
        call: Call,
        reservation: Reservation,
    ) -> tuple[Request, _Reply]:
        """A decoded request, without texts, and how it is replied to."""
        wire, embeds, facts = codec.output_type(message), message.HasField("embedding"), NO_FACTS
        allowance, outputs = Allowance(self._engine.limits, reservation), None
        if message.inputs:
            request, outputs = named_tensors.decode(message, model, call.deadline, fields, allowance)
        else:
            if embeds:
                codec.check_embedding(model)
            names = codec.input_names(model)
            request = codec.decode(message, call.deadline, names, fields, allowance)
        request.caller = _caller_of(call)
        if request.texts:
            request = self._engine.encode_texts(model, request, reservation)
            facts = TextFacts.of(request, model)
        return request, _Reply(wire, facts, embeds, outputs)

    def list_models(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        """Describes every model that the caller may read, those that failed to load included."""
        models = model_rights.readable(self._engine.repository, call)
        return pb.ListModelsResponse(models=[describe(model) for model in models])

    def get_model(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        """Describes one model."""
        repository = self._engine.repository
        model = model_rights.readable_in_any_state(repository, call, request.name, request.version)
        return pb.GetModelResponse(model=describe(model))


def _caller_of(call: Call) -> Caller:
    return ANYONE if call.identity is None else call.identity.caller


def _check_id(request_id: str) -> None:
    size = len(request_id.encode())
    if size > MAX_ID_BYTES:
        raise LimitExceededError("id", f"has {size} bytes; the limit is {MAX_ID_BYTES}")


def _encode_streamed(
    request_id: str, resolved: Future[Result], model: LoadedModel, reply: _Reply
) -> bytes | pb.AttendStreamResponse:
    try:
        return reply.encode(resolved.result(), model, request_id)
    except CancelledError:  # the call has ended
        raise
    except Exception as error:
        return _error_reply(request_id, error)


def _error_reply(request_id: str, error: Exception) -> pb.AttendStreamResponse:
    """The reply to a request that failed."""
    shown = engine_error_of(error)
    stream_error = pb.StreamError(
        code=code_of(shown).value[0], reason=shown.reason, message=shown.message, field=shown.field
    )
    return pb.AttendStreamResponse(id=request_id[:MAX_ID_BYTES], error=stream_error)
