"""grpc.health.v1, with the library's servicer."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from attention_serving.server.rpc.calls.ending import CallError
from attention_serving.server.rpc.calls.method import LARGE_BYTES, parse
from attention_serving.server.rpc.transport.call import Call

SERVICE_NAME: str = health.SERVICE_NAME


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
