"""The handlers of the Open Inference Protocol that infer, and that describe the server."""

from collections.abc import Callable
from functools import partial

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server import VERSION
from attention_serving.server.api import access
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.errors import engine_error_of
from attention_serving.server.api.open_inference import codec, parameters, response
from attention_serving.server.api.protobuf_bytes import Parsed, field
from attention_serving.server.api.request_cache import Incoming, RequestCache
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.api.tensors import Allowance
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError, OverloadedError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validated_request import ValidatedRequest
from attention_serving.server.engine.schedule.fair_shares import ANYONE
from attention_serving.server.engine.types import Result
from attention_serving.server.model_control import ModelControl
from attention_serving.server.records import RequestRecord
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

SERVER_NAME = "attention-serving"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "statistics", "logging")
RESPONSE = (pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER,)
IS_FINAL = "triton_final_response"
# The parameter of a response that is the only one to its request, if the client wants to know.
FINAL = pb.ModelInferResponse(parameters={IS_FINAL: pb.InferParameter(bool_param=True)}).SerializeToString()


class OpenInferenceService:
    """Resolves the model, decodes, submits, encodes; and describes server and models."""

    def __init__(
        self,
        engine: Engine,
        threads: CodecThreads,
        is_serving: Callable[[], bool],
        control: ModelControl | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        """Creates the handlers.

        Args:
            engine: Computes results.
            threads: Decode and encode what is large.
            is_serving: Whether the server is ready for requests.
            control: Loads and unloads models on request; None if the models never change.
            memory: The regions of shared memory; None if it is switched off.
        """
        self._extensions = list(EXTENSIONS)
        if control is not None and control.is_explicit:
            self._extensions.append("model_repository")
        if memory is not None:
            self._extensions.append("system_shared_memory")
        self._engine, self._threads = engine, threads
        self._memory = memory
        self._read = codec.reader(engine.limits)
        self._cache = RequestCache[codec.Reply](engine.repository, codec.KNOWN, codec.KNOWN_REPLY)
        self._is_serving = is_serving

    def server_live(self, request: pb.ServerLiveRequest, call: Call) -> pb.ServerLiveResponse:
        """Replies true: a server that replies is live."""
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, request: pb.ServerReadyRequest, call: Call) -> pb.ServerReadyResponse:
        """Replies true from the end of the self-test until the drain."""
        return pb.ServerReadyResponse(ready=self._is_serving())

    def model_ready(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:
        """Replies true for a loaded model, and false for an unknown one, as Triton does."""
        access.require(call, Right.READ, request.name)
        try:
            self._engine.model(request.name, request.version)
        except EngineError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._is_serving())

    def server_metadata(self, request: pb.ServerMetadataRequest, call: Call) -> pb.ServerMetadataResponse:
        """Describes the server."""
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=VERSION, extensions=self._extensions)

    async def model_infer(self, message: bytes, call: Call, reservation: Reservation) -> bytes:
        """Computes the outputs of one request."""
        incoming = self._cache.get(message, call)
        if incoming is None:
            parsed = await self._threads.parse(self._read, message, call.deadline)
            incoming = await self._decoded(parsed, call, reservation)
        return await self._answer(incoming, call, reservation)

    async def model_stream_infer(self, message: bytes, call: Call, reservation: Reservation) -> bytes:
        """Answers one request of a stream. One that fails does not end it."""
        incoming = self._cache.get(message, call)
        if incoming is not None:
            return await self._answer_streamed(incoming, call, reservation)
        parsed = await self._threads.parse(self._read, message, call.deadline)
        try:
            incoming = await self._decoded(parsed, call, reservation)
        except Exception as error:
            return _failed(parsed.message.id, error, reservation)
        return await self._answer_streamed(incoming, call, reservation)

    async def _answer_streamed(
        self, incoming: Incoming[codec.Reply], call: Call, reservation: Reservation
    ) -> bytes:
        try:
            content = await self._answer(incoming, call, reservation)
        except Exception as error:
            return _failed(incoming.id, error, reservation)
        return b"".join(field(RESPONSE, [FINAL if incoming.encoder.wants_final else b"", content]))

    async def _answer(self, incoming: Incoming[codec.Reply], call: Call, reservation: Reservation) -> bytes:
        request = incoming.request
        access.require(call, Right.INFER, request.model.name)
        if request.deadline < call.deadline:  # the request has a timeout of its own
            result = await self._run_in_time(request, call, reservation)
        else:
            result = await self._engine.run(request, reservation)
        reply = self._cache.known_reply(incoming, result, reservation)
        if reply is None:
            encode = partial(_encode, request.model, incoming.encoder, incoming.id)
            reply = await self._threads.encode(encode, result, reservation, call.deadline)
            self._cache.keep_reply(incoming, result, reply)
        return reply

    async def _run_in_time(self, request: ValidatedRequest, call: Call, reservation: Reservation) -> Result:
        """Runs a request, which fails at its own deadline."""
        cancel_timer = call.transport.call_at(request.deadline, partial(self._engine.expire, request))
        try:
            return await self._engine.run(request, reservation)
        finally:
            cancel_timer()

    async def _decoded(
        self, parsed: Parsed[pb.ModelInferRequest], call: Call, reservation: Reservation
    ) -> Incoming[codec.Reply]:
        """A request that the cache does not have."""
        work = partial(self._decode, parsed, call, reservation)
        return await self._threads.decode(work, parsed, call.deadline, is_slow=codec.is_slow(parsed))

    def _decode(
        self, parsed: Parsed[pb.ModelInferRequest], call: Call, reservation: Reservation
    ) -> Incoming[codec.Reply]:
        message, allowance = parsed.message, Allowance(self._engine.limits, reservation)
        named = codec.model_of(message)
        model = access.model_to_infer(self._engine, call, *named)
        try:
            request, reply = codec.decode(
                message, model, call.deadline, parsed.fields, allowance, self._memory
            )
            request.caller = ANYONE if call.identity is None else call.identity.caller
            incoming = Incoming(self._engine.validate(model, request), reply, message.id)
            # A timeout counts from the arrival of its request, and regions can be replaced.
            if parameters.TIMEOUT not in message.parameters and not reply.regions:
                names = [tensor.name for tensor in message.inputs]
                self._cache.store(parsed.data, named, request, incoming, lambda _: names)
        except Exception as error:
            self._engine.refused(model, error, reservation)
            raise
        return incoming


def _encode(model: LoadedModel, reply: codec.Reply, request_id: str, result: Result) -> bytes:
    shapes, types, regions, texts, _ = reply
    return response.encode(result, shapes, model, request_id, types, regions, texts)


def refuse(_message: bytes, error: OverloadedError) -> bytes:
    """Answers a request of a stream that is not parsed, because there is no memory for it."""
    return _failed("", error)


def _failed(request_id: str, error: Exception, reservation: Reservation | None = None) -> bytes:
    """The reply to a request of a stream that failed."""
    if reservation is not None and isinstance(reservation.timeline, RequestRecord):
        reservation.timeline.failed(error)
    return pb.ModelStreamInferResponse(
        error_message=engine_error_of(error).message, infer_response=pb.ModelInferResponse(id=request_id)
    ).SerializeToString()
