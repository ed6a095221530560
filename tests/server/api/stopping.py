"""Servers that stop while a test watches."""

import threading
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.server.transport.options import RpcOptions
from tests.server.seams import PATIENCE_SECONDS, Served

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
OPTIONS = RpcOptions(
    host="127.0.0.1",
    port=0,
    max_message_bytes=1 << 20,
    max_concurrent_calls=20,
    max_streams=1,
    stream_window=1,
)


class Stopping:
    """Stops a server on another thread."""

    def __init__(self, served: Served, grace: float) -> None:
        self.seconds: list[float] = []
        self._thread = threading.Thread(target=lambda: self.seconds.append(served.server.stop(grace)))
        self._thread.start()

    @property
    def goes_on(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert len(self.seconds) == 1


def watch(served: Served, service: str) -> Any:
    """Watches the health of a service."""
    message = health_pb2.HealthCheckRequest(service=service)
    return health_pb2_grpc.HealthStub(served.channel).Watch(message, timeout=PATIENCE_SECONDS)
