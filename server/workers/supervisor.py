"""Starts several server processes on one port, replaces those that end, and drains all of them."""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from attention_serving.server import cores
from attention_serving.server.child_process import Exit, ExitKind, State
from attention_serving.server.errors import WorkerError
from attention_serving.server.http.options import needs_private_sockets, options_of
from attention_serving.server.http.process import HttpProcess
from attention_serving.server.identity import guard_of
from attention_serving.server.settings import Settings
from attention_serving.server.shutdown import EXIT_SECONDS, LAST_SECONDS, StopRequest, handle_signals
from attention_serving.server.tls.watch import current_certificates
from attention_serving.server.workers.assignment import Assignment, private_socket
from attention_serving.server.workers.folder import temporary_folder
from attention_serving.server.workers.handle import WorkerHandle
from attention_serving.server.workers.metrics import MultiprocessMetrics
from attention_serving.server.workers.reservation import reserved

log = logging.getLogger(__name__)

# How much longer than `EXIT_SECONDS` a worker may take to end: it begins to drain a moment later, and may
# have to say why it does not end.
MARGIN_SECONDS = LAST_SECONDS + 2.0
# How long the HTTP process may take to send its answers once the workers have ended.
HTTP_EXIT_SECONDS = 2.0


def run(settings: Settings) -> None:
    """Serves until a signal arrives, and returns when the workers have answered every accepted call.

    Raises:
        BindError: An address cannot be listened on.
        IdentityError: The tokens file or the keys of JSON Web Tokens cannot be used.
        TlsError: A certificate cannot be used.
        WorkerError: A worker ended before all of them served.
    """
    certificates = current_certificates(settings.tls_files)
    guard = guard_of(settings) if settings.protect_metrics else None
    # The supervisor waits for pipes, so that a signal arrives as a message of one more pipe.
    requests, requests_in = Pipe(duplex=False)
    handle_signals(requests_in.send)
    with (
        temporary_folder() as folder,
        reserved(settings.host, settings.port) as port,
        closing(
            MultiprocessMetrics(folder, settings.host, settings.metrics_port, certificates, guard)
        ) as metrics,
        ExitStack() as stack,
    ):
        addresses = {"host": settings.host, "port": port, "metrics_port": metrics.port}
        if guard is not None:
            stack.callback(guard.close)
        http = _http_process(settings, port, folder, stack)
        if http is not None:
            addresses["http_port"] = http.port
        log.info("ports bound", extra=addresses)
        Supervisor(settings.model_copy(update={"port": port}), folder, metrics, requests, http).run()
    log.info("stopped")


def _http_process(settings: Settings, port: int, folder: Path, stack: ExitStack) -> HttpProcess | None:
    """The one HTTP process of all workers, if there is to be one. The stack ends it."""
    if settings.http_port is None:
        return None
    private = needs_private_sockets(settings)
    sockets = [private_socket(folder, worker) for worker in range(settings.workers)] if private else []
    http = HttpProcess(
        options_of(settings, port, sockets),
        settings.host,
        settings.http_port,
        timeout_seconds=settings.worker_timeout_seconds,
    )
    stack.callback(http.close, HTTP_EXIT_SECONDS)
    return http


class Supervisor:
    """Manages the workers from their first start until their last exit."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        metrics: MultiprocessMetrics,
        requests: Any,
        http: HttpProcess | None = None,
    ) -> None:
        """Starts no process yet.

        Args:
            settings: Settings of the service, with the bound port.
            folder: For the files of the workers' metrics.
            metrics: Serves the metrics of all workers.
            requests: A pipe that delivers requests to stop.
            http: Is started once all workers serve.
        """
        self._settings = settings
        self._metrics = metrics
        self._requests = requests
        self._http = http
        self._workers = [WorkerHandle(assignment) for assignment in assignments(settings, folder)]
        self._stopping = False
        metrics.watch(self._processes)
        self._checked_at = time.monotonic()
        self._check_seconds = self._workers[0].watchdog.interval
        # Once all workers have been ready at one time, each listens as soon as it is ready.
        self._all_ready = False
        # Once all workers have served at one time, one that ends is replaced.
        self._all_served = False

    def run(self) -> None:
        """Returns when every worker has exited.

        Raises:
            WorkerError: A worker ended before all of them served.
        """
        try:
            for worker in self._workers:
                self._start(worker)
            while not self._stopping:
                self._advance()
                self._wait()
        finally:
            self._drain()

    def _processes(self) -> Mapping[str, int]:
        """The processes of the service, by name. For any thread."""
        others = {f"worker-{worker.number}": worker.pid for worker in self._workers if worker.connection}
        if self._http is not None:
            others["http"] = self._http.pid
        running = {name: pid for name, pid in others.items() if pid is not None}
        return {"supervisor": os.getpid()} | running

    def _drain(self) -> None:
        """Lets every worker drain, and kills those that have not ended some time after the grace."""
        deadline = time.monotonic() + self._settings.grace_seconds + EXIT_SECONDS + MARGIN_SECONDS
        if self._http is not None:
            self._http.drain()
        for worker in self._workers:
            worker.drain()
        for worker in self._workers:
            if worker.wait(deadline):
                log.error("worker killed: it did not end in time", extra={"worker": worker.number})

    def _wait(self) -> None:
        """Waits for a message, an exit, a request to stop, a start or a check, and handles it."""
        workers = {worker.connection: worker for worker in self._workers if worker.connection}
        due = [worker.restart_at for worker in self._workers if worker.restart_at is not None]
        until = min([self._checked_at + self._check_seconds, *due])
        readable = wait([self._requests, *workers], max(0.0, until - time.monotonic()))
        if self._requests in readable:
            request: StopRequest = self._requests.recv()
            self._stopping = True
            log.info("draining", extra=request.fields)
            return
        for worker in map(workers.get, readable):
            if worker and not worker.receive():
                self._reap(worker)
        self._check()
        for worker in self._workers:
            if worker.restart_at is not None and worker.restart_at <= time.monotonic():
                self._start(worker)

    def _check(self) -> None:
        """Pings the workers, and kills those that do not answer. Their pipes then close."""
        seconds = time.monotonic() - self._checked_at
        if seconds >= self._check_seconds:
            self._checked_at += seconds
            for worker in self._workers:
                worker.check(seconds)

    def _start(self, worker: WorkerHandle) -> None:
        try:
            worker.start()
        except OSError as error:
            reason = f"the process could not be started: {error.strerror}"
            self._schedule_restart(worker, Exit(ExitKind.NOT_STARTED, reason))
        else:
            log.info("worker started", extra={"worker": worker.number, "pid": worker.pid})

    def _reap(self, worker: WorkerHandle) -> None:
        ended = worker.reap()
        self._metrics.remove_gauges(worker.number)
        self._schedule_restart(worker, ended)

    def _schedule_restart(self, worker: WorkerHandle, ended: Exit) -> None:
        if not self._all_served:
            raise WorkerError(ended.reason)
        self._metrics.count_restart(ended.kind)
        seconds = worker.backoff()
        fields = {"worker": worker.number, "reason": ended.reason, "restart_in_seconds": seconds}
        log.error("worker ended", extra=fields)

    def _advance(self) -> None:
        """Lets workers listen once they may, and publishes the states."""
        states = [worker.state for worker in self._workers]
        self._all_ready = self._all_ready or states.count(State.READY) == len(states)
        for worker in self._workers if self._all_ready else ():
            if worker.state is State.READY:
                worker.listen()
        serving = states.count(State.SERVING)
        self._metrics.count(ready=serving, starting=len(states) - serving)
        if not self._all_served and serving == len(states):
            self._all_served = True
            addresses = {"port": self._settings.port, "metrics_port": self._metrics.port}
            if self._http is not None:
                self._http.start()
                addresses["http_port"] = self._http.port
            log.info("serving", extra={"host": self._settings.host, "workers": len(states), **addresses})


def assignments(settings: Settings, folder: Path) -> Iterator[Assignment]:
    """The assignment of each worker: its own cores, and its share of the threads that the quota allows."""
    allowed = sorted(os.sched_getaffinity(0))
    # The cores are divided by affinity, and only the number of threads by quota: a quota does not say which
    # cores to use, and containers that all chose the first ones would compete for them.
    threads = range(cores.available())
    for worker in range(settings.workers):
        share = settings.threads or len(cores.share(threads, settings.workers, worker))
        yield Assignment(
            worker=worker,
            settings=settings.model_copy(update={"threads": share}),
            cores=frozenset(cores.share(allowed, settings.workers, worker)),
            metrics=folder,
        )
