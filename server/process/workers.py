"""Several identical servers on one port: their supervisor, which replaces those that end, and their program.

Each worker has its own models, limits and metrics. What they share is the port, the supervisor's process, the
metrics endpoint, which adds theirs up, and the HTTP process. The program of a worker is
`python -m server.process.workers DESCRIPTOR`.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from attention_serving.server import lifecycle, machine
from attention_serving.server.addresses import reserve
from attention_serving.server.engine.run.driver import VISIBLE
from attention_serving.server.errors import ServerError
from attention_serving.server.lifecycle import Inbox, StopRequest
from attention_serving.server.observe import logs, prometheus
from attention_serving.server.process.supervision import Child, ExitKind, HttpProcess
from attention_serving.server.security.tls import watch
from attention_serving.server.settings import Settings
from attention_serving.server.threads import PeriodicThread

log = logging.getLogger(__name__)

# How much longer than `EXIT_SECONDS` a worker may take to end: it begins to drain a moment later, and may
# have to say why it does not end.
MARGIN_SECONDS = lifecycle.CANCEL_TIMEOUT_SECONDS + 2.0


class Workers:
    """The supervisor of a service, with the steps and attributes of `Application`.

    Attributes:
        settings: Settings of the service, once bound with its port.
        certificates: Give the certificate of the next handshake of the metrics endpoint; None without TLS.
        guard: Authorises readers of the metrics; None if everyone may read them.
        registry: The metrics of all workers, added up, and those of this process.
        refusals: The counter of what the HTTP process refuses by itself, by reason.
    """

    def __init__(self, settings: Settings, inbox: Inbox, devices: Sequence[str] = ()) -> None:
        """Starts nothing yet.

        Args:
            settings: Settings of the service.
            inbox: Delivers the request to stop, and what the workers report.
            devices: The GPUs that workers use in turn, each as a value of CUDA_VISIBLE_DEVICES.

        Raises:
            ServerError: A certificate, the tokens file or keys of JSON Web Tokens cannot be used.
        """
        self.settings, self._inbox, self._devices = settings, inbox, devices
        self.certificates = watch(settings.tls_files) if settings.tls_files else None
        self.guard = settings.guard() if settings.protect_metrics else None
        self._workers: list[Child] = []
        self._reserved = ExitStack()

    def bind(self, folder: Path) -> int:
        """Reserves the port, for the workers to listen on; returns it.

        Args:
            folder: A folder for the sockets and metrics of the workers, which only this user can read.

        Raises:
            ServerError: The address is in use, or does not belong to this machine.
        """
        for reserved in reserve(self.settings.host, self.settings.port):
            self._reserved.enter_context(reserved)
            port: int = reserved.getsockname()[1]
        self.settings = settings = self.settings.model_copy(update={"port": port})
        self._folder, devices = folder, self._devices
        self.registry = prometheus.worker_registry(folder)
        self.refusals = prometheus.shared_counter(folder, "http", "attention_refused_requests", "reason")
        self._workers = [
            Child(
                "worker",
                __name__,
                (number, settings, folder),
                settings.worker_timeout_seconds,
                number,
                self._inbox.put,
                prometheus.create_files(folder, number),
                # Set before the process starts: the driver reads it once.
                variables={VISIBLE: devices[number % len(devices)]} if len(devices) > 1 else {},
            )
            for number in range(settings.workers)
        ]
        self._restarts = supervisor_metrics(self.registry, self._workers)
        return port

    def pids(self) -> dict[str, int | None]:
        """The id of each process by its name; None for one that does not run."""
        workers = {f"worker-{worker.number}": worker.pid for worker in self._workers}
        return {"supervisor": os.getpid(), **workers}

    def refresh(self) -> None:
        """Does nothing: the workers publish their metrics with every heartbeat."""

    def load(self) -> bool:
        """Starts the workers, until all serve; returns False if the service was asked to stop meanwhile.

        Raises:
            ServerError: A worker ended before all of them served.
        """
        for worker in self._workers:
            worker.start()
        while not all(worker.serves for worker in self._workers):
            message = self._inbox.wait()
            if isinstance(message, StopRequest):
                log.info("draining", extra=message)
                return False
            _, exit_kind, reason = message
            if exit_kind:
                raise ServerError(reason)
        return True

    def start(self) -> dict[str, int]:
        """The workers serve already; returns their number, for the log."""
        return {"workers": len(self._workers)}

    def drain(self, http: HttpProcess) -> None:
        """Counts the workers that are replaced until the service is asked to stop, and then drains it.

        Args:
            http: Is drained first, so that its requests arrive.
        """
        while not isinstance(message := self._inbox.wait(), StopRequest):
            number, exit_kind, _ = message
            if exit_kind:
                prometheus.remove_gauges(self._folder, number)
                self._restarts.labels(exit_kind).inc()
        log.info("draining", extra=message)
        http.drain()
        self.close()

    def close(self) -> None:
        """Drains all workers at the same time, and waits for their ends."""
        deadline = time.monotonic() + self.settings.grace_seconds + lifecycle.EXIT_SECONDS + MARGIN_SECONDS
        for worker in self._workers:
            worker.drain()
        for worker in self._workers:
            worker.close(deadline - time.monotonic())
        self._reserved.close()


def supervisor_metrics(registry: CollectorRegistry, workers: Sequence[Child] = ()) -> Counter:
    """Publishes the supervisor's own metrics; returns the one that counts restarts of processes."""
    states = Gauge("attention_workers", "Number of worker processes, by state.", ["state"], registry=registry)
    states.labels("ready").set_function(lambda: sum(worker.serves for worker in workers))
    states.labels("starting").set_function(lambda: sum(not worker.serves for worker in workers))
    text = "Number of worker processes that ended and were replaced, by the reason."
    restarts = Counter("attention_worker_restarts", text, ["reason"], registry=registry)
    for kind in get_args(ExitKind):
        restarts.labels(kind)
    return restarts


def share_of_machine(settings: Settings, worker: int) -> tuple[Sequence[int], int]:
    """The cores of a worker, and its share of the threads that the quota allows.

    The cores are divided by affinity, and only the number of threads by quota: a quota does not say which
    cores to use, and containers that all chose the first ones would compete for them.
    """
    allowed, threads = sorted(os.sched_getaffinity(0)), range(machine.available_cores())
    share = settings.threads or len(machine.share_of_cores(threads, settings.workers, worker))
    return machine.share_of_cores(allowed, settings.workers, worker), share


def serve(connection: Any, assignment: tuple[int, Settings, Path]) -> None:
    """The program of a worker: serves until a signal asks to stop, or until the pipe closes.

    Args:
        connection: The worker's end of the pipe; a `Connection`, whose stubs have two parameters more than
            the class.
        assignment: The number of the worker, from 0; the settings of the service, with the bound port; and
            its temporary folder, which has links to the files of its metrics.

    Raises:
        ServerError: The worker cannot serve.
    """
    worker, settings, folder = assignment
    # Before the first metric, and the first thread of the runtime, which would keep its cores.
    logs.configure(settings.log_level, settings.log_format, worker=worker)
    prometheus.write_metrics_to(folder, worker)
    cores, threads = share_of_machine(settings, worker)
    with suppress(OSError):  # the cores available to the container have changed at this moment
        os.sched_setaffinity(0, cores)
    # The supervisor needs neither ONNX Runtime nor gRPC.
    from attention_serving.server.process.application import Application  # noqa: PLC0415

    inbox = Inbox()
    lifecycle.handle_signals(inbox.put)

    def wait_for_supervisor() -> None:
        with suppress(EOFError, OSError):
            connection.recv()  # it sends nothing more: it was killed
        shutil.rmtree(folder, ignore_errors=True)
        inbox.put(StopRequest({"reason": "the supervisor has ended"}))

    def announce() -> None:
        application.refresh()
        if application.server.is_responsive():
            with suppress(OSError):  # the supervisor has ended; the closed pipe reports that too
                connection.send(lifecycle.SERVES)

    settings = settings.model_copy(update={"threads": threads})
    with closing(Application(settings, inbox)) as application:
        threading.Thread(target=wait_for_supervisor, name="supervisor", daemon=True).start()
        if not application.load():
            return
        # The port is not bound earlier: the system would distribute connections to it at once.
        port = application.bind(folder, worker)
        log.info("listening", extra={"port": port, **application.start()})
        connection.send(lifecycle.SERVES)
        PeriodicThread("heartbeat", announce, lifecycle.HEARTBEAT_SECONDS).start()
        application.drain()
    log.info("stopped")


if __name__ == "__main__":
    lifecycle.run_child(serve)
