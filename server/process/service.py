"""A service from its ports to its end: one server, or the supervisor of several."""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from attention_serving.server.machine import temporary_folder
from attention_serving.server.observe.prometheus import MetricsEndpoint, ProcessesCollector
from attention_serving.server.process.supervision import HttpProcess

if TYPE_CHECKING:  # a supervisor needs neither ONNX Runtime nor gRPC
    from attention_serving.server.process.application import Application
    from attention_serving.server.process.workers import Workers

log = logging.getLogger(__name__)


def run(service: "Application | Workers") -> None:
    """Serves until a `StopRequest` arrives and every accepted call has been answered.

    If one arrives while models load, this returns without waiting for the load: no call has been accepted,
    and a load cannot be interrupted.

    Args:
        service: Is bound, loaded, started, drained and closed.

    Raises:
        ServerError: The service cannot serve.
    """
    settings = service.settings
    with ExitStack() as stack:
        folder = Path()  # unused if there is one process
        if settings.workers > 1 or settings.http_port is not None:
            folder = Path(stack.enter_context(temporary_folder()))
        stack.callback(service.close)
        ports: dict[str, object] = {"host": settings.host, "port": service.bind(folder)}
        endpoint = MetricsEndpoint(
            service.registry,
            settings.host,
            settings.metrics_port,
            service.refresh,
            certificates=service.certificates,
            guard=service.guard if settings.protect_metrics else None,
        )
        http = HttpProcess(settings, folder, service.refusals)
        stack.callback(http.close)
        service.registry.register(ProcessesCollector(lambda: service.pids() | {"http": http.pid}))
        ports |= {"metrics_port": endpoint.port, **http.ports}
        if settings.unix_socket is not None:
            ports["unix_socket"] = settings.unix_socket
        log.info("ports bound", extra=ports)
        if not service.load():
            return
        counts = service.start()
        if settings.http_port is not None:
            http.start()
        log.info("serving", extra=ports | counts)
        service.drain(http)
    log.info("stopped")
