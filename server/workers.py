"""Several identical servers on one port: starts them, replaces those that end, and drains all of them.

Each worker has its own models, limits and metrics. What they share is the port, this process, which watches
them, the metrics endpoint, which adds theirs up, and the HTTP process.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.multiprocess import mark_process_dead

from attention_serving.server import machine
from attention_serving.server.addresses import reserve
from attention_serving.server.errors import WorkerError
from attention_serving.server.http.child import HttpProcess, http_process, needs_private_sockets
from attention_serving.server.observe.prometheus import MetricsEndpoint, ProcessesCollector, worker_registry
from attention_serving.server.settings import Settings
from attention_serving.server.shutdown import EXIT_SECONDS, LAST_SECONDS, Inbox, StopRequest
from attention_serving.server.supervision import Child, ExitKind, Order, State
from attention_serving.server.tls import current_certificates

log = logging.getLogger(__name__)

MODULE = "attention_serving.server.worker"
# How much longer than `EXIT_SECONDS` a worker may take to end: it begins to drain a moment later, and may
# have to say why it does not end.
MARGIN_SECONDS = LAST_SECONDS + 2.0


class Assignment(NamedTuple):
    """Supervisor to worker, first: what to serve, and with which resources.

    Attributes:
        worker: Number of the worker, from 0.
        settings: Settings of the service, with the bound port and the number of threads of this worker.
        cores: CPU cores that its threads may use.
        folder: The service's temporary folder, for the files of its metrics.
        sockets: Where it listens for the HTTP process alone, if that needs it.
    """

    worker: int
    settings: Settings
    cores: frozenset[int]
    folder: Path
    sockets: list[Path]


def assignments(settings: Settings, folder: Path) -> Iterator[Assignment]:
    """The assignment of each worker: its own cores, and its share of the threads that the quota allows."""
    allowed = sorted(os.sched_getaffinity(0))
    # The cores are divided by affinity, and only the number of threads by quota: a quota does not say which
    # cores to use, and containers that all chose the first ones would compete for them.
    threads = range(machine.available_cores())
    for worker in range(settings.workers):
        share = settings.threads or len(machine.share_of_cores(threads, settings.workers, worker))
        yield Assignment(
            worker=worker,
            settings=settings.model_copy(update={"threads": share}),
            cores=frozenset(machine.share_of_cores(allowed, settings.workers, worker)),
            folder=folder,
            sockets=[folder / f"grpc-{worker}"] if needs_private_sockets(settings) else [],
        )


def run(settings: Settings, inbox: Inbox) -> None:
    """Serves until a `StopRequest` arrives, and returns when the workers have answered every accepted call.

    Raises:
        BindError: An address cannot be listened on.
        IdentityError: The tokens file or the keys of JSON Web Tokens cannot be used.
        TlsError: A certificate cannot be used.
        WorkerError: A worker ended before all of them served.
    """
    certificates = current_certificates(settings.tls_files)
    guard = settings.guard() if settings.protect_metrics else None
    with ExitStack() as stack:
        folder = stack.enter_context(machine.temporary_folder())
        reserved = [stack.enter_context(each) for each in reserve(settings.host, settings.port)]
        settings = settings.model_copy(update={"port": reserved[0].getsockname()[1]})
        registry = worker_registry(folder)
        endpoint = MetricsEndpoint(
            registry, settings.host, settings.metrics_port, certificates=certificates, guard=guard
        )
        ports = {"host": settings.host, "port": settings.port, "metrics_port": endpoint.port}
        assigned = list(assignments(settings, folder))
        http = http_process(settings, settings.port, [path for each in assigned for path in each.sockets])
        if http is not None:
            stack.callback(http.close)
            ports["http_port"] = http.port
        log.info("ports bound", extra=ports)
        Service(assigned, registry, inbox, http).run(ports)
    log.info("stopped")


class Service:
    """The workers, from their first start until the last exit."""

    def __init__(
        self,
        assigned: Sequence[Assignment],
        registry: CollectorRegistry,
        inbox: Inbox,
        http: HttpProcess | None,
    ) -> None:
        """Starts no process yet.

        Args:
            assigned: What each worker does.
            registry: The metrics of all workers, to which those of the supervisor are added.
            inbox: Delivers the request to stop, and the events of the workers.
            http: Is started once all workers serve, and drained before them; its owner closes it.
        """
        self._inbox, self._http = inbox, http
        self._settings, self._folder = assigned[0].settings, assigned[0].folder
        timeout = self._settings.worker_timeout_seconds
        self._workers = [
            Child("worker", MODULE, each, timeout, number=each.worker, report=self._report)
            for each in assigned
        ]
        registry.register(ProcessesCollector(self._processes))
        self._states, self._restarts = own_metrics(registry)
        # Once all workers have been ready at one time, each listens as soon as it is ready.
        self._all_ready = False
        # Once all workers have served at one time, one that ends is replaced.
        self._all_served = False

    def run(self, ports: Mapping[str, object]) -> None:
        """Returns when every worker has exited.

        Args:
            ports: Where the service listens, for the log.

        Raises:
            WorkerError: A worker ended before all of them served.
        """
        try:
            for worker in self._workers:
                worker.start()
            self._advance(ports)
            while not isinstance(message := self._inbox.get(), StopRequest):
                self._take(message)
                self._advance(ports)
            log.info("draining", extra=message.fields)
        finally:
            deadline = time.monotonic() + self._settings.grace_seconds + EXIT_SECONDS + MARGIN_SECONDS
            if self._http is not None:
                self._http.drain()
            for worker in self._workers:
                worker.drain()
            for worker in self._workers:
                worker.close(deadline - time.monotonic())

    def _report(self, worker: Child, event: State | ExitKind, reason: str) -> None:
        self._inbox.put((worker, event, reason))

    def _take(self, message: Any) -> None:
        """Takes what a worker reported: a state, or the end of a process, which it replaces itself."""
        worker, event, reason = message
        if isinstance(event, ExitKind):
            if not self._all_served:
                raise WorkerError(reason)
            # Its gauges are removed; its counters remain.
            mark_process_dead(worker.number, str(self._folder))  # type: ignore[no-untyped-call]
            self._restarts.labels(event).inc()

    def _advance(self, ports: Mapping[str, object]) -> None:
        """Lets workers listen once they may, and publishes the states."""
        states = [worker.state for worker in self._workers]
        self._all_ready = self._all_ready or states.count(State.READY) == len(states)
        for worker in self._workers:
            if self._all_ready and worker.state is State.READY:
                worker.send(Order.LISTEN)
        serving = states.count(State.SERVING)
        self._states.labels("ready").set(serving)
        self._states.labels("starting").set(len(states) - serving)
        if not self._all_served and serving == len(states):
            self._all_served = True
            if self._http is not None:
                self._http.start()
            log.info("serving", extra={"workers": len(states), **ports})

    def _processes(self) -> Mapping[str, int | None]:
        """The processes of the service, by name. For any thread."""
        http = self._http.pid if self._http is not None else None
        workers = {f"worker-{worker.number}": worker.pid for worker in self._workers}
        return {"supervisor": os.getpid(), "http": http, **workers}


def own_metrics(registry: CollectorRegistry) -> tuple[Gauge, Counter]:
    """The supervisor's own metrics: the number of workers, and that of their restarts."""
    text = "Number of worker processes, by state."
    workers = Gauge("attention_workers", text, ["state"], registry=registry)
    text = "Number of worker processes that ended and were replaced, by the reason."
    restarts = Counter("attention_worker_restarts", text, ["reason"], registry=registry)
    for kind in ExitKind:
        restarts.labels(kind)
    return workers, restarts
