"""The handlers of attention.v1: bytes, model, decode, run, encode."""

from collections.abc import Awaitable
from functools import partial
from typing import Any, NamedTuple

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api import access
from attention_serving.server.api.attention import codec, fields, named_tensors
from attention_serving.server.api.attention.codec import NO_FACTS, TextFacts
from attention_serving.server.api.attention.model_codec import describe
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.errors import code_of, engine_error_of
from attention_serving.server.api.protobuf_bytes import Parsed, leading_text
from attention_serving.server.api.request_cache import Incoming, RequestCache
from attention_serving.server.api.tensors import Allowance, WireFloat
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import LimitExceededError, OverloadedError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.schedule.fair_shares import ANYONE
from attention_serving.server.engine.types import Request, Result
from attention_serving.server.records import RequestRecord
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

# A response contains the id of its request.
MAX_ID_BYTES = 1024


class _Encoder(NamedTuple):
    """What encodes the reply to a request, beside its result and its model."""

    wire: WireFloat
    facts: TextFacts
    embeds: bool
    outputs: named_tensors.NamedOutputs | None

    def encode(self, model: LoadedModel, stream_id: str | None, result: Result) -> bytes:
        """Serializes a result as an AttendResponse, or as an AttendStreamResponse with its id."""
        wire, facts, embeds, outputs = self
        if outputs is not None:
            return named_tensors.encode(result, model, outputs, wire, stream_id)
        if stream_id is None:
            return codec.encode(result, model, wire, facts, embeds=embeds)
        return codec.encode_streamed(stream_id, result, model, wire, facts, embeds=embeds)


class AttentionService:
    """The handlers. Those of inference take serialized requests, and return serialized replies."""

    def __init__(self, engine: Engine, threads: CodecThreads) -> None:
        """Creates the handlers.

        Args:
            engine: Computes results.
            threads: Decode and encode what is large.
        """
        self._engine, self._threads = engine, threads
        self._read, self._read_streamed = fields.reader(engine.limits), fields.streamed_reader(engine.limits)
        models = engine.repository
        self._cache = RequestCache[_Encoder](models, fields.KNOWN, fields.KNOWN_REPLY)
        self._streamed = RequestCache[_Encoder](models, fields.KNOWN_STREAMED, fields.KNOWN_STREAMED_REPLY)

    async def attend(self, message: bytes, call: Call, reservation: Reservation) -> bytes:
        """Computes the context vectors of one request."""
        incoming = self._cache.get(message, call)
        if incoming is None:
            parsed = await self._threads.parse(self._read, message, call.deadline)
            work = partial(self._decoded, self._cache, parsed, parsed.message, call, reservation)
            incoming = await self._threads.decode(work, parsed, call.deadline, is_slow=fields.is_slow(parsed))
        return await self._answer(self._cache, incoming, None, call, reservation)

    async def attend_stream(self, message: bytes, call: Call, reservation: Reservation) -> bytes:
        """Answers one request of a stream. If it fails, an error takes its place and the stream goes on."""
        incoming = self._streamed.get(message, call)
        if incoming is not None:
            answer = self._answer(self._streamed, incoming, incoming.id, call, reservation)
            return await _or_error(answer, incoming.id, reservation)
        parsed = await self._threads.parse(self._read_streamed, message, call.deadline)
        return await _or_error(self._answer_new(parsed, call, reservation), parsed.message.id, reservation)

    async def _answer_new(
        self, parsed: Parsed[pb.AttendStreamRequest], call: Call, reservation: Reservation
    ) -> bytes:
        """Answers a request of a stream that the cache does not have."""
        request_id, message = parsed.message.id, parsed.message.request
        _check_id(request_id)
        work = partial(self._decoded, self._streamed, parsed, message, call, reservation)
        is_slow = fields.is_slow_streamed(parsed)
        incoming = await self._threads.decode(work, parsed, call.deadline, is_slow=is_slow)
        return await self._answer(self._streamed, incoming, request_id, call, reservation)

    def refuse_streamed(self, message: bytes, error: OverloadedError) -> bytes:
        """Answers a request of a stream that is not parsed, because there is no memory for it."""
        return _error_reply(leading_text(message, pb.AttendStreamRequest.ID_FIELD_NUMBER), error)

    async def _answer(
        self,
        cache: RequestCache[_Encoder],
        incoming: Incoming[_Encoder],
        stream_id: str | None,
        call: Call,
        reservation: Reservation,
    ) -> bytes:
        model = incoming.request.model
        access.require(call, Right.INFER, model.name)
        result = await self._engine.run(incoming.request, reservation)
        reply = cache.known_reply(incoming, result, reservation)
        if reply is None:
            encode = partial(incoming.encoder.encode, model, stream_id)
            reply = await self._threads.encode(encode, result, reservation, call.deadline)
            cache.keep_reply(incoming, result, reply)
        return reply

    def _decoded(
        self,
        cache: RequestCache[_Encoder],
        parsed: Parsed[Any],
        message: pb.AttendRequest,
        call: Call,
        reservation: Reservation,
    ) -> Incoming[_Encoder]:
        """A request that the cache does not have; `parsed` is what it was received in."""
        named = codec.model_of(message)
        model = access.model_to_infer(self._engine, call, *named)
        try:
            request, reply = self._request(model, message, parsed, call, reservation)
            incoming = Incoming(self._engine.validate(model, request), reply)
            cache.store(parsed.data, named, request, incoming, partial(codec.inputs_of, message, model))
        except Exception as error:
            self._engine.refused(model, error, reservation)
            raise
        return incoming

    def _request(
        self,
        model: LoadedModel,
        message: pb.AttendRequest,
        parsed: Parsed[Any],
        call: Call,
        reservation: Reservation,
    ) -> tuple[Request, _Encoder]:
        """A decoded request, without texts, and how it is replied to."""
        wire, embeds, facts = codec.output_type(message), message.HasField("embedding"), NO_FACTS
        allowance, outputs = Allowance(self._engine.limits, reservation), None
        if message.inputs:
            request, outputs = named_tensors.decode(message, model, call.deadline, parsed.fields, allowance)
        else:
            if embeds:
                codec.check_embedding(model)
            names = codec.input_names(model)
            request = codec.decode(message, call.deadline, names, parsed.fields, allowance)
        request.caller = ANYONE if call.identity is None else call.identity.caller
        if request.texts:
            request = self._engine.encode_texts(model, request, reservation)
            facts = TextFacts.of(request, model)
        return request, _Encoder(wire, facts, embeds, outputs)

    def list_models(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        """Describes every model that the caller may read, those that failed to load included."""
        models = access.readable(self._engine.repository, call)
        return pb.ListModelsResponse(models=[describe(model) for model in models])

    def get_model(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        """Describes one model."""
        repository = self._engine.repository
        model = access.readable_in_any_state(repository, call, request.name, request.version)
        return pb.GetModelResponse(model=describe(model))


def _check_id(request_id: str) -> None:
    size = len(request_id.encode())
    if size > MAX_ID_BYTES:
        raise LimitExceededError("id", f"has {size} bytes; the limit is {MAX_ID_BYTES}")


async def _or_error(answer: Awaitable[bytes], request_id: str, reservation: Reservation) -> bytes:
    """The reply to a request of a stream, or the error that takes its place."""
    try:
        return await answer
    except Exception as error:
        if isinstance(reservation.timeline, RequestRecord):
            reservation.timeline.failed(error)
        return _error_reply(request_id, error)


def _error_reply(request_id: str, error: Exception) -> bytes:
    """The reply to a request that failed."""
    shown = engine_error_of(error)
    stream_error = pb.StreamError(
        code=code_of(shown).value[0], reason=shown.reason, message=shown.message, field=shown.field
    )
    return pb.AttendStreamResponse(id=request_id[:MAX_ID_BYTES], error=stream_error).SerializeToString()
