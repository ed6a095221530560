"""grpc.health.v1, with the library's servicer."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from attention_serving.server.rpc.calls.ending import CallError
from attention_serving.server.rpc.calls.route import Send
from attention_serving.server.rpc.transport.seam import Call

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

    def check(self, request: health_pb2.HealthCheckRequest, call: Call) -> health_pb2.HealthCheckResponse:
        """Replies with the current status; NOT_FOUND for an unknown service."""
        return self._servicer.Check(request, _Context(call))

    def watch(
        self, request: health_pb2.HealthCheckRequest, call: Call, send: Send[health_pb2.HealthCheckResponse]
    ) -> None:
        """Sends the current status, and each later one until the call ends."""

        def send_status(response: Any) -> None:
            if response is not None:  # the servicer's sign that the call has ended
                send(response)

        self._servicer.Watch(request, _Context(call), send_status)
        call.add_done_callback(partial(self._forget, request.service))

    def _forget(self, service: str) -> None:
        """Forgets a name that nobody watches any more. The library would keep it for ever, however long."""
        watchers = self._servicer._send_response_callbacks
        with self._servicer._lock:
            if not watchers.get(service):
                watchers.pop(service, None)


class _Context:
    """The part of `grpc.ServicerContext` that the library's servicer uses."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def set_code(self, code: grpc.StatusCode) -> None:
        raise CallError(code, "the server has no such service")

    def add_callback(self, callback: Callable[[], None]) -> None:
        self._call.add_done_callback(callback)
