"""gRPC's own services, health and reflection, with the library's servicers."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from attention_serving.server.api.errors import CallError
from attention_serving.server.api.method import LARGE_BYTES, parse
from attention_serving.server.transport.call import Call

HEALTH: str = health.SERVICE_NAME


class HealthService:
    """Answers for the server as a whole, whose name is empty, for its services and for its models."""

    def __init__(self, services: Iterable[str]) -> None:
        """Begins with NOT_SERVING.

        Args:
            services: Full names of the services.
        """
        self._names = ("", *services)
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
        """A call that watched has ended. Forgets a name that nobody watches: the library never would."""
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


REFLECTION: str = reflection.SERVICE_NAME
PACKAGE_V1 = "grpc.reflection.v1"
REFLECTION_V1 = f"{PACKAGE_V1}.ServerReflection"
REFLECTIONS = (REFLECTION_V1, REFLECTION)
FILE_V1 = "grpc/reflection/v1/reflection.proto"


class ReflectionService:
    """Lists the services and describes their files."""

    def __init__(self, services: Iterable[str]) -> None:
        _describe_v1(descriptor_pool.Default())  # type: ignore[no-untyped-call]
        self._servicer = reflection.ReflectionServicer(tuple(services))

    def info(
        self,
        request: reflection_pb2.ServerReflectionRequest,
        call: Call,  # noqa: ARG002 - the signature of a handler
    ) -> reflection_pb2.ServerReflectionResponse:
        """Replies to one request of a stream. The messages of both versions are the same on the wire."""
        replies: Any = self._servicer.ServerReflectionInfo(iter((request,)), None)
        return next(replies)


def _describe_v1(pool: Any) -> None:
    """Adds the descriptor of version 1, which the library lacks: that of v1alpha in another package."""
    try:
        pool.FindFileByName(FILE_V1)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
        file.name, file.package = FILE_V1, PACKAGE_V1
        for field in (field for message in file.message_type for field in message.field):
            if field.type_name:
                field.type_name = _in_v1(field.type_name)
        for method in (method for service in file.service for method in service.method):
            method.input_type, method.output_type = _in_v1(method.input_type), _in_v1(method.output_type)
        pool.Add(file)


def _in_v1(type_name: str) -> str:
    return type_name.replace(".grpc.reflection.v1alpha.", f".{PACKAGE_V1}.")
