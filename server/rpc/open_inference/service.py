"""The handlers of the Open Inference Protocol that infer, and that describe the server and its models."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server import VERSION
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.caller import ANYONE, Caller
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Result
from attention_serving.server.engine.validation import ValidatedRequest
from attention_serving.server.model_control import ModelControl
from attention_serving.server.rpc import model_rights
from attention_serving.server.rpc.calls.deferred import DeferredReply
from attention_serving.server.rpc.known_requests import Answered, KnownRequests, Recalled
from attention_serving.server.rpc.notes import note_refusal
from attention_serving.server.rpc.open_inference import codec, parameters, response, stream
from attention_serving.server.rpc.protobuf_bytes import Parsed
from attention_serving.server.rpc.shared_memory import SharedMemory
from attention_serving.server.rpc.tensors import Allowance
from attention_serving.server.rpc.transport.seam import Call
from attention_serving.server.security.rights import Right

SERVER_NAME = "attention-serving"
RecalledInfer: TypeAlias = Recalled[codec.Reply]
EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "statistics", "logging")


class OpenInferenceService:
    """Resolves the model, decodes, submits, encodes; and describes server and models."""

    def __init__(
        self,
        engine: Engine,
        is_serving: Callable[[], bool],
        control: ModelControl | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        """Creates the handlers.

        Args:
            engine: Computes results.
            is_serving: Whether the server is ready for requests.
            control: Loads and unloads models on request; None if the models never change.
            memory: The regions of shared memory; None if it is switched off.
        """
        self._extensions = list(EXTENSIONS)
        if control is not None and control.is_explicit:
            self._extensions.append("model_repository")
        if memory is not None:
            self._extensions.append("system_shared_memory")
        self._engine = engine
        self._memory = memory
        self._known = KnownRequests[codec.Reply](engine, codec.KNOWN_FIELDS, codec.ID)
        self._is_serving = is_serving

    def server_live(self, request: pb.ServerLiveRequest, call: Call) -> pb.ServerLiveResponse:
        """Replies true: a server that replies is live."""
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, request: pb.ServerReadyRequest, call: Call) -> pb.ServerReadyResponse:
        """Replies true from the end of the self-test until the drain."""
        return pb.ServerReadyResponse(ready=self._is_serving())

    def model_ready(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:
        """Replies true for a loaded model, and false for an unknown one, as Triton does."""
        model_rights.require(call, Right.READ, request.name)
        try:
            self._engine.model(request.name, request.version)
        except EngineError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._is_serving())

    def server_metadata(self, request: pb.ServerMetadataRequest, call: Call) -> pb.ServerMetadataResponse:
        """Describes the server."""
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=VERSION, extensions=self._extensions)

    def recall(self, message: bytes) -> RecalledInfer | None:
        """The request that a message is known to be."""
        return self._known.recall(message)

    def model_infer(
        self, request: Parsed[pb.ModelInferRequest] | RecalledInfer, call: Call, reservation: Reservation
    ) -> DeferredReply:
        """Computes the outputs of one request."""
        if isinstance(request, Recalled):
            model, request_id = request.model, request.request_id
            model_rights.require(call, Right.INFER, model.name)
        else:
            request_id = request.message.id
            model = model_rights.model_to_infer(self._engine, call, *codec.model_of(request.message))
        caller = ANYONE if call.identity is None else call.identity.caller
        try:
            if isinstance(request, Recalled):
                validated, reply = request.request(call.deadline, caller), request.known.reply
            else:
                validated, reply = self._decoded(model, request, call.deadline, caller, reservation)
            future = self._engine.queue(validated, reservation)
        except Exception as error:
            note_refusal(self._engine, reservation, model, error)
            raise

        def encode(resolved: Future[Result]) -> bytes:
            shapes, types, regions, texts, _ = reply
            return response.encode(resolved.result(), shapes, model, request_id, types, regions, texts)

        return DeferredReply(future, encode, validated.deadline)

    def _decoded(
        self,
        model: LoadedModel,
        request: Parsed[pb.ModelInferRequest],
        deadline: float,
        caller: Caller,
        reservation: Reservation,
    ) -> tuple[ValidatedRequest, codec.Reply]:
        """A request that is not known, and how it is replied to."""
        message, allowance = request.message, Allowance(self._engine.limits, reservation)
        decoded = codec.decode(message, model, deadline, request.fields, allowance, self._memory)
        decoded.request.caller = caller
        validated, reply = self._engine.validate(model, decoded.request), decoded.reply
        # A timeout counts from the arrival of its request, and regions can be replaced.
        if parameters.TIMEOUT not in message.parameters and not reply.regions:
            answered = Answered(codec.model_of(message), decoded.request, validated, reply)
            self._known.learn(request.data, answered, lambda _: [tensor.name for tensor in message.inputs])
        return validated, reply

    def model_stream_infer(
        self, request: Parsed[pb.ModelInferRequest] | RecalledInfer, call: Call, reservation: Reservation
    ) -> DeferredReply | pb.ModelStreamInferResponse:
        """Answers one request of a stream."""
        return stream.answer(self.model_infer, request, call, reservation)
