"""The route table: every method that the server answers.

A new method is one entry here, one handler in its service and its codec.
"""

from collections.abc import Callable, Mapping

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from attention_serving.protos.attention.v1 import attention_pb2 as attention_pb
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.limits import Limits
from attention_serving.server.model_control import ModelControl
from attention_serving.server.rpc import access_check, reflection
from attention_serving.server.rpc.access import CallAccess
from attention_serving.server.rpc.attention import fields
from attention_serving.server.rpc.attention.service import AttentionService
from attention_serving.server.rpc.calls.codec_threads import CodecThreads
from attention_serving.server.rpc.calls.intake import Intake
from attention_serving.server.rpc.calls.route import (
    CallKind,
    Route,
    ordered_stream,
    server_streaming,
    tensors,
    unary,
)
from attention_serving.server.rpc.health import SERVICE_NAME as HEALTH
from attention_serving.server.rpc.health import HealthService
from attention_serving.server.rpc.open_inference import routes as open_inference
from attention_serving.server.rpc.reflection import ReflectionService
from attention_serving.server.rpc.shared_memory import SharedMemory
from attention_serving.server.security.rights import Right

ATTENTION: str = attention_pb.DESCRIPTOR.services_by_name["AttentionService"].full_name
SERVICES = (ATTENTION, open_inference.SERVICE)


def route_table(
    engine: Engine,
    threads: CodecThreads,
    health: HealthService,
    is_serving: Callable[[], bool],
    control: ModelControl | None = None,
    memory: SharedMemory | None = None,
    *,
    access: CallAccess | None = None,
    open_reflection: bool = False,
) -> Mapping[str, Route]:
    """The route of each method by its full name.

    Args:
        engine: Computes what the methods of our services ask for.
        threads: Decode and encode what is large.
        health: The state of the server.
        is_serving: Whether the server is ready for requests.
        control: Loads and unloads models on request; None if the models never change.
        memory: The regions of shared memory; None if it is switched off.
        access: Checks who calls; None lets everyone do everything.
        open_reflection: Whether everyone may use reflection; otherwise it needs the right to read.
    """
    intake = Intake(engine.budget, threads)
    routes = {
        **_attention(AttentionService(engine), engine.limits, intake),
        **open_inference.routes(engine, is_serving, intake, control, memory),
        **_health(health),
        **_reflection(
            ReflectionService((*SERVICES, *reflection.SERVICE_NAMES, HEALTH)),
            None if open_reflection else Right.READ,
        ),
    }
    return {**routes, **access_check.routes(access, routes)}


def _attention(service: AttentionService, limits: Limits, intake: Intake) -> dict[str, Route]:
    pb = attention_pb
    return {
        f"/{ATTENTION}/Attend": tensors(
            CallKind.UNARY,
            fields.reader(limits),
            service.attend,
            pb.AttendResponse.SerializeToString,
            intake,
            recall=service.recall,
            is_slow=fields.is_slow,
        ),
        f"/{ATTENTION}/AttendStream": tensors(
            CallKind.ORDERED_STREAM,
            fields.streamed_reader(limits),
            service.attend_stream,
            pb.AttendStreamResponse.SerializeToString,
            intake,
            recall=service.recall_streamed,
            is_slow=fields.is_slow_streamed,
            refuse=service.refuse_streamed,
        ),
        f"/{ATTENTION}/ListModels": unary(
            pb.ListModelsRequest.FromString,
            service.list_models,
            pb.ListModelsResponse.SerializeToString,
            takes_place=False,
            right=Right.READ,
        ),
        f"/{ATTENTION}/GetModel": unary(
            pb.GetModelRequest.FromString,
            service.get_model,
            pb.GetModelResponse.SerializeToString,
            takes_place=False,
            right=Right.READ,
        ),
    }


def _health(service: HealthService) -> dict[str, Route]:
    read = health_pb2.HealthCheckRequest.FromString
    write = health_pb2.HealthCheckResponse.SerializeToString
    return {
        "/grpc.health.v1.Health/Check": unary(
            read, service.check, write, counted=False, takes_place=False, right=None
        ),
        "/grpc.health.v1.Health/Watch": server_streaming(
            read, service.watch, write, counted=False, takes_place=False, right=None
        ),
    }


def _reflection(service: ReflectionService, right: Right | None) -> dict[str, Route]:
    read = reflection_pb2.ServerReflectionRequest.FromString
    write = reflection_pb2.ServerReflectionResponse.SerializeToString
    route = ordered_stream(read, service.info, write, counted=False, takes_place=False, right=right)
    return {f"/{name}/ServerReflectionInfo": route for name in reflection.SERVICE_NAMES}
