"""Every method that the server answers, and gRPC's own services, health and reflection.

A new method is one entry here, one handler in its service and its codec.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from attention_serving.server.api.attention import service as attention
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.errors import CallError
from attention_serving.server.api.method import (
    LARGE_BYTES,
    CallKind,
    Method,
    of_names,
    of_service,
    parse,
    require,
)
from attention_serving.server.api.open_inference import service as open_inference
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.models.control import ModelControl
from attention_serving.server.security.peers import ACCESS_CHECK, SEPARATOR
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

SERVICES = (attention.SERVICE.full_name, open_inference.SERVICE.full_name)
HEALTH: str = health.SERVICE_NAME
REFLECTION: str = reflection.SERVICE_NAME
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
REFLECTIONS = (REFLECTION_V1, REFLECTION)
FILE_V1 = "grpc/reflection/v1/reflection.proto"


def all_methods(
    engine: Engine,
    threads: CodecThreads,
    health: "HealthService",
    is_serving: Callable[[], bool],
    control: ModelControl | None = None,
    memory: SharedMemory | None = None,
    *,
    identify: Callable[[Call, Method], None],
) -> Mapping[str, Method]:
    """Each method by its full name.

    Args:
        engine: Computes what the methods of our services ask for.
        threads: Decode and encode what is large.
        health: The state of the server.
        is_serving: Whether the server is ready for requests.
        control: Loads and unloads models on request; None if the models never change.
        memory: The regions of shared memory; None if it is switched off.
        identify: Checks who calls, and the right for a method: `Admission.identify`.
    """
    methods = {
        **attention.methods(engine, threads),
        **open_inference.methods(engine, is_serving, threads, control, memory),
        **of_service(
            health_pb2.DESCRIPTOR.services_by_name["Health"], None, is_counted=False, Check=health.check
        ),
        f"/{HEALTH}/Watch": Method(
            kind=CallKind.SERVER_STREAMING, handle=health.watch, is_counted=False, right=None
        ),
        **_reflection(),
    }
    return {**methods, **_access_check(identify, methods)}


class HealthService:
    """Answers for the server as a whole, whose name is empty, for its services and for its models."""

    def __init__(self) -> None:
        """Begins with NOT_SERVING."""
        self._names = ("", *SERVICES)
        self._models: set[str] = set()
        self._servicer = health.HealthServicer()
        self.set_serving(serving=False)

    def set_serving(self, *, serving: bool) -> None:
        """Sets the status of the server and of every service, and sends it to those that watch."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            self._servicer.set(name, status.SERVING if serving else status.NOT_SERVING)

    def set_models(self, ready: set[str]) -> None:
        """Sets the status of models: SERVING for those that are ready, NOT_SERVING for those that were."""
        status = health_pb2.HealthCheckResponse
        for name in sorted((self._models | ready) - set(self._names)):
            self._servicer.set(name, status.SERVING if name in ready else status.NOT_SERVING)
        self._models |= ready

    def check(self, request: health_pb2.HealthCheckRequest, _call: Call) -> health_pb2.HealthCheckResponse:
        """Replies with the current status; NOT_FOUND for an unknown service."""
        return self._servicer.Check(request, _Context())

    def watch(self, message: bytes, _call: Call, send: Callable[[bytes], None]) -> Callable[[], None]:
        """Sends the current status, and each later one; returns what ends that."""
        request = parse(health_pb2.HealthCheckRequest.FromString, message, LARGE_BYTES)

        def send_status(response: Any) -> None:
            if response is not None:  # the servicer's sign that the call has ended
                send(response.SerializeToString())

        context = _Context()
        self._servicer.Watch(request, context, send_status)
        return partial(self._end, request.service, context)

    def _end(self, service: str, context: "_Context") -> None:
        """A call that watched has ended. Forgets a name without watchers, which the library keeps."""
        for callback in context.callbacks:
            callback()
        watchers = self._servicer._send_response_callbacks
        with self._servicer._lock:
            if not watchers.get(service):
                watchers.pop(service, None)


class _Context:
    """The part of `grpc.ServicerContext` that the library's servicer uses."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def set_code(self, code: grpc.StatusCode) -> None:
        raise CallError(code, "the server has no such service")

    def add_callback(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)


def _reflection() -> dict[str, Method]:
    """Lists the services and describes their files. Both versions are the same on the wire."""
    pool: Any = descriptor_pool.Default()  # type: ignore[no-untyped-call]
    try:
        pool.FindFileByName(FILE_V1)
    except KeyError:  # the library lacks version 1: it is v1alpha in another package
        file = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
        text = text_format.MessageToString(file).replace("v1alpha", "v1")
        pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
    servicer = reflection.ReflectionServicer((*SERVICES, *REFLECTIONS, HEALTH))

    def info(request: Message, _call: Call) -> Message:
        (reply,) = servicer.ServerReflectionInfo(iter((request,)), None)
        return cast("Message", reply)

    service = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    (method,) = of_service(service, Right.READ, is_counted=False, ServerReflectionInfo=info).values()
    return {f"/{name}/ServerReflectionInfo": method for name in REFLECTIONS}


def _access_check(
    identify: Callable[[Call, Method], None], others: Mapping[str, Method]
) -> dict[str, Method]:
    """The method.

    Args:
        identify: Notes who calls, and checks the right for a method: `Admission.identify`.
        others: The methods that are asked about.
    """

    def check(request: StringValue, call: Call) -> None:
        method, _, model = request.value.partition(SEPARATOR)
        asked = others.get(method)
        if asked is None:
            raise InvalidRequestError("value", "is not a method of this server")
        identify(call, asked)
        if model and asked.right is not None:
            require(call, asked.right, model)

    return {ACCESS_CHECK: of_names(StringValue.FromString, check, is_counted=False, right=None)}
