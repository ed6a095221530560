"""The methods of the Open Inference Protocol: those that infer, and the table of all."""

from collections.abc import Callable, Mapping
from typing import Any

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.errors import engine_error_of
from attention_serving.server.api.inference import Inference
from attention_serving.server.api.method import Method, of_names
from attention_serving.server.api.open_inference import codec, tensors
from attention_serving.server.api.open_inference.models import ModelService
from attention_serving.server.api.open_inference.server import ServerMethods
from attention_serving.server.api.protobuf_bytes import Parsed, field, text_field
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.api.tensors import Allowance, Reply
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Request, Result
from attention_serving.server.model_control import ModelControl
from attention_serving.server.security.rights import Right

SERVICE: str = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
ID, RESPONSE = (
    pb.ModelInferResponse.ID_FIELD_NUMBER,
    (pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER,),
)


class ModelInfer(Inference):
    """Computes the outputs of one request."""

    kind, paths = pb.ModelInferRequest, tensors.PATHS

    def __init__(self, engine: Engine, threads: CodecThreads, memory: SharedMemory | None = None) -> None:
        """Creates the method; `memory` is None if shared memory is switched off."""
        super().__init__(engine, threads)
        self._memory = memory

    def _is_slow(self, parsed: Parsed[Any]) -> bool:
        return codec.is_slow(parsed)

    def _decode(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[Request, Reply]:
        return codec.decode(parsed, model, deadline, allowance, self._memory, in_stream=self.is_stream)

    def _encode(self, reply: Reply, result: Result, request_id: str) -> bytes:
        parts = reply.parts(result)
        if request_id:
            parts.insert(0, text_field(ID, request_id))
        return b"".join(parts)


class ModelStreamInfer(ModelInfer):
    """Answers one request of a stream."""

    is_stream = True

    def _encode(self, reply: Reply, result: Result, request_id: str) -> bytes:
        return b"".join(field(RESPONSE, [text_field(ID, request_id), *reply.parts(result)]))

    def _failed(self, request_id: str, error: Exception) -> bytes:
        return pb.ModelStreamInferResponse(
            error_message=engine_error_of(error).message, infer_response=pb.ModelInferResponse(id=request_id)
        ).SerializeToString()


def methods(
    engine: Engine,
    is_serving: Callable[[], bool],
    threads: CodecThreads,
    control: ModelControl | None = None,
    memory: SharedMemory | None = None,
) -> dict[str, Method]:
    """Each method by its full name.

    Args:
        engine: Computes results.
        is_serving: Whether the server is ready for requests.
        threads: Decode and encode what is large.
        control: Loads and unloads models on request; None if the models never change.
        memory: The regions of shared memory; None if it is switched off.
    """
    infer, stream = ModelInfer(engine, threads, memory), ModelStreamInfer(engine, threads, memory)
    models, server = ModelService(engine, control), ServerMethods(engine, is_serving, control, memory)
    return {
        **_without_tensors(None, {"ServerLive": server.live, "ServerReady": server.ready}),
        **_without_tensors(
            Right.READ,
            {
                "ServerMetadata": server.metadata,
                "ModelReady": server.model_ready,
                "ModelMetadata": models.metadata,
                "ModelConfig": models.config,
                "ModelStatistics": models.statistics,
                "RepositoryIndex": models.index,
            },
        ),
        **_without_tensors(
            Right.ADMIN,
            {
                "RepositoryModelLoad": models.load,
                "RepositoryModelUnload": models.unload,
                "SystemSharedMemoryStatus": server.regions,
                "SystemSharedMemoryRegister": server.register,
                "SystemSharedMemoryUnregister": server.unregister,
                "CudaSharedMemoryStatus": server.cuda_regions,
                "CudaSharedMemoryRegister": server.register_cuda,
                "CudaSharedMemoryUnregister": server.unregister_cuda,
                "TraceSetting": server.trace_settings,
                "LogSettings": server.log_settings,
            },
        ),
        f"/{SERVICE}/ModelInfer": infer.method(),
        f"/{SERVICE}/ModelStreamInfer": stream.method(),
    }


def _without_tensors(right: Right | None, handlers: Mapping[str, Callable[..., Any]]) -> dict[str, Method]:
    """Methods that take no place of inference: a busy server still tells what it is and has."""
    return {
        f"/{SERVICE}/{name}": of_names(
            getattr(pb, f"{name}Request").FromString,
            handler,
            getattr(pb, f"{name}Response").SerializeToString,
            right=right,
        )
        for name, handler in handlers.items()
    }
