"""Every method that the server answers, and gRPC's own services, health and reflection.

A new method is one entry in the handlers of its protocol.
"""

import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial
from typing import Any, cast
from weakref import WeakSet

from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from attention_serving.server.api import tei
from attention_serving.server.api.attention import handlers as attention
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.method import (
    LARGE_BYTES,
    Method,
    control_method,
    control_methods,
    parse,
    require_right,
)
from attention_serving.server.api.open_inference import handlers as open_inference
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.coroutines import Task, suspend
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError, ModelNotFoundError
from attention_serving.server.engine.models.control import ModelControl
from attention_serving.server.security.peers import ACCESS_CHECK, SEPARATOR
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

DESCRIPTORS = attention.SERVICE, open_inference.SERVICE, *tei.SERVICES
SERVICES = tuple(service.full_name for service in DESCRIPTORS)
HEALTH: str = health.SERVICE_NAME
REFLECTION: str = reflection.SERVICE_NAME
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
SERVER_NAMES = frozenset({"", *SERVICES})
Status: Any = health_pb2.HealthCheckResponse


def all_methods(
    engine: Engine,
    threads: CodecThreads,
    health: "HealthService",
    control: ModelControl,
    memory: SharedMemory,
    *,
    authenticate: Callable[[Call, Method], None],
    max_calls: int = 0,
) -> Mapping[str, Method]:
    """Each method by its full name.

    Args:
        engine: Computes what the methods of our services ask for.
        threads: Decode and encode what is large.
        health: The state of the server.
        control: Loads and unloads models on request.
        memory: The regions of shared memory.
        authenticate: Checks who calls, and the right for a method: `AdmissionControl.authenticate`.
        max_calls: Most calls of inference at a time.
    """
    typed = attention.methods(engine, threads)
    methods = {
        **typed,
        **tei.methods(engine, threads, typed, max_calls),
        **open_inference.Handlers(engine, health.is_serving, control, memory).methods(threads),
        **control_methods(
            health_pb2.DESCRIPTOR.services_by_name["Health"], None, is_counted=False, Check=health.check
        ),
        f"/{HEALTH}/Watch": Method(kind="server stream", handle=health.watch, is_counted=False, right=None),
        **_reflection(),
    }

    def check_access(request: StringValue, call: Call) -> None:
        name, _, model = request.value.partition(SEPARATOR)
        method = methods.get(name)
        if method is None:
            raise InvalidRequestError("value", "is not a method of this server")
        authenticate(call, method)
        if model and method.right is not None:
            require_right(call, method.right, engine.repository.resolve(model), model)

    access = control_method(StringValue.FromString, check_access, is_counted=False, right=None)
    return {**methods, ACCESS_CHECK: access}


class HealthService:
    """Answers for the server as a whole, whose name is empty, for its services and for its models."""

    def __init__(self) -> None:
        """Begins with NOT_SERVING."""
        self._statuses: dict[str, int] = {}
        # The calls that wait for a change.
        self._watchers: WeakSet[Task] = WeakSet()
        self._is_draining = False
        self._lock = threading.Lock()
        self.set_serving(serving=False)

    def set_serving(self, *, serving: bool) -> None:
        """Sets the status of the server and of every service, and sends it to those that watch."""
        self._set(SERVER_NAMES, Status.SERVING if serving else Status.NOT_SERVING)

    def is_serving(self) -> bool:
        """Whether the server is ready for requests."""
        return bool(self._statuses[""] == Status.SERVING)

    def set_models(self, ready: set[str]) -> None:
        """Sets the status of models: SERVING for those that are ready, NOT_SERVING for those that were."""
        self._set(self._statuses.keys() - SERVER_NAMES - ready, Status.NOT_SERVING)
        self._set(ready - SERVER_NAMES, Status.SERVING)

    def drain(self) -> None:
        """Ends those that watch, once they have the current status."""
        self._is_draining = True
        self._set((), Status.NOT_SERVING)

    def _set(self, names: Collection[str], status: int) -> None:
        with self._lock:
            self._statuses |= dict.fromkeys(names, status)
            watchers, self._watchers = tuple(self._watchers), WeakSet()
        for task in watchers:
            task.wake()

    def check(self, request: health_pb2.HealthCheckRequest, _call: Call) -> health_pb2.HealthCheckResponse:
        """Replies with the current status; NOT_FOUND for an unknown service."""
        status = self._statuses.get(request.service)
        if status is None:
            raise ModelNotFoundError("the server has no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def watch(self, message: bytes) -> AsyncIterator[bytes]:
        """Replies with the current status, and again when it has changed, until `drain`."""
        name, sent = parse(health_pb2.HealthCheckRequest.FromString, message, LARGE_BYTES).service, None
        del message  # the call may last for days
        while True:
            is_draining, status = self._is_draining, self._statuses.get(name, Status.SERVICE_UNKNOWN)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status).SerializeToString()
            elif is_draining:
                return
            else:
                await suspend(partial(self._await_change, name, status))

    def _await_change(self, name: str, status: int, task: Task) -> None:
        with self._lock:
            if self._statuses.get(name, Status.SERVICE_UNKNOWN) == status and not self._is_draining:
                self._watchers.add(task)
                return
        task.wake()


def _reflection() -> dict[str, Method]:
    """Lists the services and describes their files. Both versions are the same on the wire; one is listed."""
    servicer = reflection.ReflectionServicer((*SERVICES, REFLECTION, HEALTH))

    def info(request: Message, _call: Call) -> Message:
        (reply,) = servicer.ServerReflectionInfo(iter((request,)), None)
        return cast("Message", reply)

    service = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    (method,) = control_methods(service, Right.READ, is_counted=False, ServerReflectionInfo=info).values()
    return {f"/{name}/ServerReflectionInfo": method for name in (REFLECTION_V1, REFLECTION)}
