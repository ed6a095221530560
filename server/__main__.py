"""Command line: `python -m server --model-repository FOLDER`, and a service from its ports to its end."""

import logging
import os
import resource
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from attention_serving.server.addresses import check_exposure
from attention_serving.server.engine.run.driver import visible_devices
from attention_serving.server.errors import ServerError
from attention_serving.server.lifecycle import Inbox, end, handle_signals
from attention_serving.server.machine import temporary_folder
from attention_serving.server.observe import logs
from attention_serving.server.process.command_line import create_command, unknown_variables
from attention_serving.server.settings import Settings

if TYPE_CHECKING:  # a supervisor needs neither ONNX Runtime nor gRPC, and --help none of them
    from attention_serving.server.process.application import Application
    from attention_serving.server.process.workers import Workers

log = logging.getLogger(__name__)


def main() -> None:
    """Runs the server and ends the process with its status."""
    create_command(lambda settings: end(serve(settings)))()


def serve(settings: Settings) -> int:
    """Serves until the process is asked to stop; returns its exit status."""
    logs.configure(settings.log_level, settings.log_format)
    # NumPy reads it when it is imported. The codec threads multiply matrices side by side; further threads
    # of OpenBLAS would spin while they wait for each other, and take the cores from runs.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Connections take descriptors. The lower limit is meant for programs that use `select`.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for name in unknown_variables(os.environ):
        log.warning("unknown environment variable", extra={"variable": name})
    try:
        check_exposure(settings.host, encrypted=settings.tls_files is not None, insecure=settings.insecure)
        inbox = Inbox()
        handle_signals(inbox.put)
        is_on_host = settings.workers == 1 or settings.provider == "cpu"
        devices = [] if is_on_host else visible_devices()
        if settings.workers == 0:  # a process without a device says why, or takes the host
            settings = settings.model_copy(update={"workers": max(1, len(devices))})
        if settings.workers > 1:
            from attention_serving.server.process.workers import Workers  # noqa: PLC0415

            run(Workers(settings, inbox, devices))
        else:
            from attention_serving.server.process.application import Application  # noqa: PLC0415

            run(Application(settings, inbox))
    except ServerError as error:
        log.error("cannot serve", extra={"reason": str(error)})
        return 1
    except Exception:
        log.exception("failed")
        return 1
    return 0


def run(service: "Application | Workers") -> None:
    """Serves until a `StopRequest` arrives and every accepted call has been answered.

    If one arrives while models load, this returns without waiting for the load: no call has been accepted,
    and a load cannot be interrupted.

    Args:
        service: Is bound, loaded, started, drained and closed.

    Raises:
        ServerError: The service cannot serve.
    """
    from attention_serving.server.observe.prometheus import MetricsEndpoint, ProcessesCollector  # noqa: PLC0415
    from attention_serving.server.process.supervision import HttpProcess  # noqa: PLC0415

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
        bound = settings.model_copy(update={"metrics_port": endpoint.port})
        http = HttpProcess(bound, folder, service.refusals)
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


if __name__ == "__main__":
    main()
