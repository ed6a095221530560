"""The methods of the Open Inference Protocol."""

from collections.abc import Callable, Mapping
from typing import Any

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.method import Method, of_names, of_tensors
from attention_serving.server.api.open_inference.logging_settings import LogService
from attention_serving.server.api.open_inference.models import ModelService
from attention_serving.server.api.open_inference.regions import RegionService
from attention_serving.server.api.open_inference.service import OpenInferenceService, refuse
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.engine.engine import Engine
from attention_serving.server.model_control import ModelControl
from attention_serving.server.security.rights import Right

SERVICE: str = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name


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
    service = OpenInferenceService(engine, threads, is_serving, control, memory)
    regions = RegionService(memory)
    models, logs = ModelService(engine, control), LogService()
    return {
        **_without_tensors(None, {"ServerLive": service.server_live, "ServerReady": service.server_ready}),
        **_without_tensors(
            Right.READ,
            {
                "ServerMetadata": service.server_metadata,
                "ModelReady": service.model_ready,
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
                "SystemSharedMemoryStatus": regions.status,
                "SystemSharedMemoryRegister": regions.register,
                "SystemSharedMemoryUnregister": regions.unregister,
                "CudaSharedMemoryStatus": regions.status_cuda,
                "CudaSharedMemoryRegister": regions.register_cuda,
                "CudaSharedMemoryUnregister": regions.unregister_cuda,
                "TraceSetting": logs.trace_settings,
                "LogSettings": logs.log_settings,
            },
        ),
        f"/{SERVICE}/ModelInfer": of_tensors(service.model_infer, engine.budget),
        f"/{SERVICE}/ModelStreamInfer": of_tensors(service.model_stream_infer, engine.budget, refuse),
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
