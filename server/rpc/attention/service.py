"""The handlers of attention.v1."""

from concurrent.futures import CancelledError, Future
from typing import NamedTuple

from protos.attention.v1 import attention_pb2 as pb
from server.engine.budget import Reservation
from server.engine.caller import ANYONE
from server.engine.engine import Engine
from server.engine.errors import LimitExceededError, OverloadedError
from server.engine.model import LoadedModel
from server.engine.types import Result
from server.engine.validation import ValidatedRequest
from server.rpc import model_rights
from server.rpc.allowance import Allowance
from server.rpc.attention import codec
from server.rpc.attention.model_codec import describe
from server.rpc.attention.text_facts import NO_FACTS, TextFacts
from server.rpc.calls.deferred import DeferredReply
from server.rpc.calls.ending import engine_error_of
from server.rpc.half_precision import WireFloat
from server.rpc.known_requests import KnownRequests
from server.rpc.notes import note_failure, note_refusal
from server.rpc.protobuf_bytes import Fields, Parsed, leading_text
from server.rpc.status import code_of
from server.rpc.transport.seam import Call

# A response contains the id of its request.
MAX_ID_BYTES = 1024


class _Reply(NamedTuple):
    """What encodes the reply to a request, beside its result."""

    model: LoadedModel
    wire: WireFloat
    facts: TextFacts
    embeds: bool


class AttentionService:
    """Resolves the model, decodes, submits, encodes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known = KnownRequests[_Reply]()

    def attend(
        self, request: Parsed[pb.AttendRequest], call: Call, reservation: Reservation
    ) -> DeferredReply:
        """Computes the context vectors of one request."""
        message = request.message
        model = model_rights.model_to_infer(self._engine, call, message.model_name, message.model_version)
        future, (_, wire, facts, embeds) = self._submit(model, message, request.fields, call, reservation)
        return DeferredReply(
            future, lambda resolved: codec.encode(resolved.result(), model, wire, facts, embeds=embeds)
        )

    def attend_stream(
        self, request: Parsed[pb.AttendStreamRequest], call: Call, reservation: Reservation
    ) -> DeferredReply | pb.AttendStreamResponse:
        """Answers one request of a stream. If it fails, an error takes its place and the stream goes on."""
        message = request.message
        try:
            own = message.request
            model = model_rights.model_to_infer(self._engine, call, own.model_name, own.model_version)
            _check_id(message.id)
            future, reply = self._submit(model, own, request.fields, call, reservation)
        except Exception as error:
            note_failure(reservation, error)
            return _error_reply(message.id, error)
        return DeferredReply(future, lambda resolved: _encode_streamed(message.id, resolved, reply))

    def refuse_streamed(self, message: bytes, error: OverloadedError) -> pb.AttendStreamResponse:
        """Answers a request of a stream that is not parsed, because there is no memory for it."""
        return _error_reply(leading_text(message, pb.AttendStreamRequest.ID_FIELD_NUMBER), error)

    def _submit(
        self,
        model: LoadedModel,
        message: pb.AttendRequest,
        fields: Fields,
        call: Call,
        reservation: Reservation,
    ) -> tuple[Future[Result], _Reply]:
        try:
            validated, reply = self._validated(model, message, fields, call, reservation)
            return self._engine.queue(validated, reservation), reply
        except Exception as error:
            note_refusal(self._engine, reservation, model, error)
            raise

    def _validated(
        self,
        model: LoadedModel,
        message: pb.AttendRequest,
        fields: Fields,
        call: Call,
        reservation: Reservation,
    ) -> tuple[ValidatedRequest, _Reply]:
        """The request, and how it is replied to."""
        caller = ANYONE if call.identity is None else call.identity.caller
        head = None if fields else codec.head_of(message)
        if head is not None:
            slot = self._known.slot(model, head)
            if slot.known is not None:
                return slot.known.request(head.contents, call.deadline, caller), slot.known.reply
            fields = head.fields()
        wire, embeds, facts = codec.output_type(message), message.HasField("embedding"), NO_FACTS
        if embeds:
            codec.check_embedding(model)
        allowance, names = Allowance(self._engine.limits, reservation), codec.input_names(model)
        request = codec.decode(message, call.deadline, names, fields, allowance)
        request.caller = caller
        if request.texts:
            request = self._engine.encode_texts(model, request, reservation)
            facts = TextFacts.of(request, model)
        validated, reply = self._engine.validate(model, request), _Reply(model, wire, facts, embeds)
        if head is not None:
            slot.learn(request, validated, head.contents, codec.inputs_of(head, names), reply)
        return validated, reply

    def list_models(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        """Describes every model that the caller may read, those that failed to load included."""
        models = model_rights.readable(self._engine.repository, call)
        return pb.ListModelsResponse(models=[describe(model) for model in models])

    def get_model(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        """Describes one model."""
        repository = self._engine.repository
        model = model_rights.readable_in_any_state(repository, call, request.name, request.version)
        return pb.GetModelResponse(model=describe(model))


def _check_id(request_id: str) -> None:
    size = len(request_id.encode())
    if size > MAX_ID_BYTES:
        raise LimitExceededError("id", f"has {size} bytes; the limit is {MAX_ID_BYTES}")


def _encode_streamed(
    request_id: str, resolved: Future[Result], reply: _Reply
) -> bytes | pb.AttendStreamResponse:
    try:
        return codec.encode_streamed(
            request_id,
            resolved.result(),
            reply.model,
            reply.wire,
            reply.facts,
            embeds=reply.embeds,
        )
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
