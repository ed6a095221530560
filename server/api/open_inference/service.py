"""The methods of the Open Inference Protocol: the table of all, and the handlers of those that infer."""

from collections.abc import Callable
from typing import Any

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.errors import engine_error_of
from attention_serving.server.api.inference import Inference
from attention_serving.server.api.method import Method, of_service
from attention_serving.server.api.open_inference import codec, parameters, tensors
from attention_serving.server.api.open_inference.handlers import Handlers
from attention_serving.server.api.protobuf_bytes import Parsed, field, text_field
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.api.tensors import Allowance, Reply
from attention_serving.server.engine.contexts import CONTEXT_ID
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import ModelControl
from attention_serving.server.engine.types import Request, Result
from attention_serving.server.security.rights import Right

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
RESPONSE = (pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER,)


class ModelInfer(Inference):
    """Computes the outputs of one request."""

    kind, paths, id_path = pb.ModelInferRequest, tensors.PATHS, (pb.ModelInferResponse.ID_FIELD_NUMBER,)
    is_slow = staticmethod(codec.is_slow)

    def __init__(self, engine: Engine, threads: CodecThreads, memory: SharedMemory) -> None:
        """Creates the method, whose tensors may be in shared memory."""
        super().__init__(engine, threads)
        self._memory = memory

    def _context_id(self, parsed: Parsed[Any]) -> str:
        given = parameters.read(parsed.message.parameters)
        return parameters.typed(given, CONTEXT_ID, str, "the id of a stored context") or ""

    def _decode(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[Request, Reply]:
        return codec.decode(parsed, model, deadline, allowance, self._memory, in_stream=self.is_stream)


class ModelStreamInfer(ModelInfer):
    """Answers one request of a stream."""

    is_stream = True

    def _encode(self, reply: Reply, result: Result, request_id: str) -> bytes:
        return b"".join(field(RESPONSE, [text_field(self.id_path[0], request_id), *reply.parts(result)]))

    def _failed(self, request_id: str, error: Exception) -> bytes:
        return pb.ModelStreamInferResponse(
            error_message=engine_error_of(error).message, infer_response=pb.ModelInferResponse(id=request_id)
        ).SerializeToString()


def methods(
    engine: Engine,
    is_serving: Callable[[], bool],
    threads: CodecThreads,
    control: ModelControl | None,
    memory: SharedMemory,
) -> dict[str, Method]:
    """Each method by its full name.

    Args:
        engine: Computes results.
        is_serving: Whether the server is ready for requests.
        threads: Decode and encode what is large.
        control: Loads and unloads models on request; None if the models never change.
        memory: The regions of shared memory.
    """
    own = Handlers(engine, is_serving, control, memory)
    return {
        f"/{SERVICE.full_name}/ModelInfer": ModelInfer(engine, threads, memory).method(),
        f"/{SERVICE.full_name}/ModelStreamInfer": ModelStreamInfer(engine, threads, memory).method(),
        **of_service(SERVICE, None, ServerLive=own.live, ServerReady=own.ready),
        **of_service(
            SERVICE,
            Right.READ,
            ServerMetadata=own.metadata,
            ModelReady=own.model_ready,
            ModelMetadata=own.model_metadata,
            ModelConfig=own.config,
            ModelStatistics=own.statistics,
            RepositoryIndex=own.index,
        ),
        **of_service(
            SERVICE,
            Right.ADMIN,
            RepositoryModelLoad=own.load,
            RepositoryModelUnload=own.unload,
            SystemSharedMemoryStatus=own.regions,
            SystemSharedMemoryRegister=own.register,
            SystemSharedMemoryUnregister=own.unregister,
            CudaSharedMemoryStatus=own.without_cuda,
            CudaSharedMemoryRegister=own.register_cuda,
            CudaSharedMemoryUnregister=own.without_cuda,
            TraceSetting=own.trace_settings,
            LogSettings=own.log_settings,
        ),
    }
