"""Several identical servers on one port: starts them, replaces those that end, and drains all of them.

Each worker has its own models, limits and metrics. What they share is the port, this process, which watches
them, the metrics endpoint, which adds theirs up, and the HTTP process.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, cast, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from attention_serving.server import machine
from attention_serving.server.errors import ServerError
from attention_serving.server.http import HttpProcess
from attention_serving.server.observe.prometheus import (
    MetricsEndpoint,
    ProcessesCollector,
    create_files,
    remove_gauges,
    shared_counter,
    worker_registry,
)
from attention_serving.server.process.addresses import reserve
from attention_serving.server.process.settings import Settings
from attention_serving.server.process.shutdown import CANCEL_TIMEOUT_SECONDS, EXIT_SECONDS, Inbox, StopRequest
from attention_serving.server.process.supervision import Child, Event, ExitKind
from attention_serving.server.security.tls import current_certificates

log = logging.getLogger(__name__)

# How much longer than `EXIT_SECONDS` a worker may take to end: it begins to drain a moment later, and may
# have to say why it does not end.
MARGIN_SECONDS = CANCEL_TIMEOUT_SECONDS + 2.0


class Assignment(NamedTuple):
    """Supervisor to worker: what to serve, and with which resources.

    Attributes:
        worker: Number of the worker, from 0.
        settings: Settings of the service, with the bound port and the number of threads of this worker.
        cores: CPU cores that its threads may use.
        folder: The service's temporary folder, which has links to the files of its metrics.
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
        worker_settings = settings.model_copy(update={"threads": share})
        cores = frozenset(machine.share_of_cores(allowed, settings.workers, worker))
        sockets = [folder / f"grpc-{worker}"] if settings.http_port is not None else []
        yield Assignment(worker, worker_settings, cores, folder, sockets)


def run(settings: Settings, inbox: Inbox) -> None:
    """Serves until a `StopRequest` arrives, and returns when the workers have answered every accepted call.

    Raises:
        ServerError: An address, a certificate, the tokens file or keys of JSON Web Tokens cannot be used; or
            a worker ended before all of them served.
    """
    certificates = current_certificates(settings.tls_files)
    guard = settings.guard() if settings.protect_metrics else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(machine.temporary_folder()))
        reserved = [stack.enter_context(bound) for bound in reserve(settings.host, settings.port)]
        settings = settings.model_copy(update={"port": reserved[0].getsockname()[1]})
        registry = worker_registry(folder)
        endpoint = MetricsEndpoint(
            registry, settings.host, settings.metrics_port, certificates=certificates, guard=guard
        )
        assigned = list(assignments(settings, folder))
        sockets = [path for assignment in assigned for path in assignment.sockets]
        refusals = shared_counter(folder, "http", "attention_refused_requests", "reason")
        http = HttpProcess(settings, sockets, refusals)
        stack.callback(http.close)
        ports = {"host": settings.host, "port": settings.port, "metrics_port": endpoint.port, **http.ports}
        log.info("ports bound", extra=ports)
        module, timeout = "attention_serving.server.process.worker", settings.worker_timeout_seconds
        workers = [
            Child("worker", module, assignment, timeout, number, inbox.put, create_files(folder, number))
            for number, assignment in enumerate(assigned)
        ]
        children = {f"worker-{worker.number}": worker for worker in workers}
        registry.register(ProcessesCollector("supervisor", {"http": http, **children}))

        def all_serve() -> None:
            http.start()
            log.info("serving", extra={"workers": len(workers), **ports})

        stack.callback(close, workers, settings.grace_seconds)
        stack.callback(http.drain)
        supervise(workers, inbox, folder, own_metrics(registry, workers), all_serve)
    log.info("stopped")


def supervise(
    workers: Sequence[Child], inbox: Inbox, folder: Path, restarts: Counter, all_serve: Callable[[], None]
) -> None:
    """Starts the workers, which replace their processes, and returns when the service is asked to stop.

    Args:
        workers: The workers.
        inbox: Delivers the request to stop, and what the workers report.
        folder: The files of the workers' metrics.
        restarts: Counts processes that were replaced.
        all_serve: Called once all workers serve.

    Raises:
        ServerError: A worker ended before all of them served.
    """
    for worker in workers:
        worker.start()
    have_served = False
    while not isinstance(message := inbox.wait(), StopRequest):
        number, ended, reason = cast("Event", message)
        if ended and not have_served:
            raise ServerError(reason)
        if ended:
            remove_gauges(folder, cast("int", number))
            restarts.labels(ended).inc()
        elif not have_served and all(worker.serves for worker in workers):
            have_served = True
            all_serve()
    log.info("draining", extra=message)


def close(workers: Sequence[Child], grace_seconds: float) -> None:
    """Drains all workers at the same time, and waits for their ends."""
    deadline = time.monotonic() + grace_seconds + EXIT_SECONDS + MARGIN_SECONDS
    for worker in workers:
        worker.drain()
    for worker in workers:
        worker.close(deadline - time.monotonic())


def own_metrics(registry: CollectorRegistry, workers: Sequence[Child] = ()) -> Counter:
    """Publishes the supervisor's own metrics; returns the one that counts restarts of processes."""
    states = Gauge("attention_workers", "Number of worker processes, by state.", ["state"], registry=registry)
    states.labels("ready").set_function(lambda: sum(worker.serves for worker in workers))
    states.labels("starting").set_function(lambda: sum(not worker.serves for worker in workers))
    text = "Number of worker processes that ended and were replaced, by the reason."
    restarts = Counter("attention_worker_restarts", text, ["reason"], registry=registry)
    for kind in get_args(ExitKind):
        restarts.labels(kind)
    return restarts
