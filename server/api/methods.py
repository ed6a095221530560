"""Every method that the server answers.

A new method is one entry here, one handler in its service and its codec.
"""

from collections.abc import Callable, Mapping

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from attention_serving.protos.attention.v1 import attention_pb2 as attention_pb
from attention_serving.server.api.access import CallAccess, check_method
from attention_serving.server.api.attention.service import AttentionService
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.grpc_services import HEALTH, REFLECTIONS, HealthService, ReflectionService
from attention_serving.server.api.method import CallKind, Method, of_names, of_tensors
from attention_serving.server.api.open_inference import methods as open_inference
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.engine.engine import Engine
from attention_serving.server.model_control import ModelControl
from attention_serving.server.security.rights import Right

ATTENTION: str = attention_pb.DESCRIPTOR.services_by_name["AttentionService"].full_name
SERVICES = (ATTENTION, open_inference.SERVICE)


def all_methods(
    engine: Engine,
    threads: CodecThreads,
    health: HealthService,
    is_serving: Callable[[], bool],
    control: ModelControl | None = None,
    memory: SharedMemory | None = None,
    *,
    access: CallAccess | None = None,
) -> Mapping[str, Method]:
    """Each method by its full name.

    Args:
        engine: Computes what the methods of our services ask for.
        threads: Decode and encode what is large.
        health: The state of the server.
        is_serving: Whether the server is ready for requests.
        control: Loads and unloads models on request; None if the models never change.
        memory: The regions of shared memory; None if it is switched off.
        access: Checks who calls; None lets everyone do everything.
    """
    methods = {
        **_attention(AttentionService(engine, threads), engine),
        **open_inference.methods(engine, is_serving, threads, control, memory),
        **_health(health),
        **_reflection(ReflectionService((*SERVICES, *REFLECTIONS, HEALTH)), Right.READ),
    }
    return {**methods, **check_method(access, methods)}


def _attention(service: AttentionService, engine: Engine) -> dict[str, Method]:
    pb = attention_pb
    return {
        f"/{ATTENTION}/Attend": of_tensors(service.attend, engine.budget),
        f"/{ATTENTION}/AttendStream": of_tensors(
            service.attend_stream, engine.budget, service.refuse_streamed
        ),
        f"/{ATTENTION}/ListModels": of_names(
            pb.ListModelsRequest.FromString,
            service.list_models,
            pb.ListModelsResponse.SerializeToString,
            right=Right.READ,
        ),
        f"/{ATTENTION}/GetModel": of_names(
            pb.GetModelRequest.FromString,
            service.get_model,
            pb.GetModelResponse.SerializeToString,
            right=Right.READ,
        ),
    }


def _health(service: HealthService) -> dict[str, Method]:
    read = health_pb2.HealthCheckRequest.FromString
    write = health_pb2.HealthCheckResponse.SerializeToString
    return {
        "/grpc.health.v1.Health/Check": of_names(read, service.check, write, is_counted=False, right=None),
        "/grpc.health.v1.Health/Watch": Method(
            kind=CallKind.SERVER_STREAMING, handle=service.watch, is_counted=False, right=None
        ),
    }


def _reflection(service: ReflectionService, right: Right | None) -> dict[str, Method]:
    method = of_names(
        reflection_pb2.ServerReflectionRequest.FromString,
        service.info,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
        kind=CallKind.ORDERED_STREAM,
        is_counted=False,
        right=right,
    )
    return {f"/{name}/ServerReflectionInfo": method for name in REFLECTIONS}
