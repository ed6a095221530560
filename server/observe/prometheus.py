"""What Prometheus' client library lacks: an endpoint with bounds and a guard, bulk histograms, processes."""

import logging
import os
import socket
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, get_args
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import (
    CollectorRegistry,
    Histogram,
    Metric,
    disable_created_metrics,
    make_wsgi_app,
    values,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from attention_serving.server.addresses import listen
from attention_serving.server.engine.errors import Code, EngineError
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.rights import Right
from attention_serving.server.security.tls import WatchedCertificates, renewing_context

log = logging.getLogger(__name__)

disable_created_metrics()  # type: ignore[no-untyped-call]
PATH = "/metrics"
# Connections at a time; further ones wait in the operating system's queue.
MAX_CONNECTIONS = 16
# How long a connection may take for its request and the answer: as long as Prometheus waits by default.
CONNECTION_SECONDS = 10.0
# How long to wait after a connection could not be accepted.
RETRY_SECONDS = 0.5
STATUSES = {Code.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED, Code.PERMISSION_DENIED: HTTPStatus.FORBIDDEN}
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# How the gauges of several workers become one.
AmongWorkers = Literal["livemin", "livemax", "livesum"]
# What the names of the client library's files begin with.
FILE_KINDS = ("counter", "histogram", *(f"gauge_{mode}" for mode in get_args(AmongWorkers)))
# Of each file at first, as in the library.
FILE_BYTES = 1 << 16


class MetricsEndpoint(ThreadingWSGIServer):
    """Serves the metrics of a registry at /metrics, over HTTP or HTTPS, until it is closed.

    Each connection has a thread.

    Attributes:
        port: The port that it listens on.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        refresh: Callable[[], None] = lambda: None,
        *,
        certificates: WatchedCertificates | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Starts to listen.

        Args:
            registry: The metrics.
            host: Address or host name.
            port: 0 selects a free port.
            refresh: Called before the metrics are read.
            certificates: Have the certificate of the next connection; None encrypts nothing.
            guard: Authorises readers of the metrics; None allows everyone.

        Raises:
            ServerError: The address is in use, or does not belong to this machine.
        """
        self._slots = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, *unused = listen(host, port, "metrics")
        for listener in unused:
            listener.close()
        self.server_name, self.port = self.socket.getsockname()[:2]
        self.server_port = self.port
        self.setup_environ()
        if certificates is not None:  # the thread of a connection does its handshake, with the first read
            context = renewing_context(certificates)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.set_app(_guard_metrics(make_wsgi_app(registry), refresh, guard))
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self.shutdown()
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Waits until a connection may be open, and accepts it."""
        self._slots.acquire()
        try:
            return super().get_request()
        except OSError:  # without descriptors, the loop that accepts would not wait otherwise
            self._slots.release()
            time.sleep(RETRY_SECONDS)
            raise

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection."""
        super().shutdown_request(request)
        self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - as socketserver calls it
        """Logs a failed connection."""
        log.debug("metrics connection failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    def handle(self) -> None:
        """Answers the request. Limits of single waits would not end a request of slow bytes."""
        timer = threading.Timer(CONNECTION_SECONDS, self._abort)
        timer.daemon = True
        timer.start()
        super().handle()
        timer.cancel()

    def _abort(self) -> None:
        with suppress(OSError):  # the peer has left
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)  # that of TLS could send plain text

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that the library uses
        """Logs nothing: scrapes are frequent."""


def _guard_metrics(metrics: Any, refresh: Callable[[], None], guard: Guard | None) -> Any:
    """The application that serves metrics, or says why they are refused."""

    def answer(environ: dict[str, Any], start_response: Callable[..., object]) -> Any:
        status, message = HTTPStatus.NOT_FOUND, f"only {PATH} is served on this port"
        try:
            if environ["PATH_INFO"] == PATH:
                if guard is not None:
                    token = environ.get("HTTP_AUTHORIZATION")
                    sent = () if token is None else (("authorization", token),)
                    # Connections of one address are not told apart: failures count for all of them.
                    guard.authenticate(sent, tuple, lambda: environ["REMOTE_ADDR"] + ":").require(Right.READ)
                refresh()
                return metrics(environ, start_response)
        except EngineError as error:
            status, message = STATUSES.get(error.code, HTTPStatus.SERVICE_UNAVAILABLE), error.message
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        headers += [("WWW-Authenticate", "Bearer")] if status is HTTPStatus.UNAUTHORIZED else []
        start_response(f"{status} {status.phrase}", headers)
        return [f"{message}\n".encode()]

    return answer


class BulkHistogram(Histogram):
    """A histogram that observes several values at once. Any thread may call its methods.

    A metric of the client library takes 1 to 2 microseconds for each event: it locks each of its values.
    Events wait in lists instead (`server.engine.events`), and are counted together.
    """

    _buckets: list[Any]
    _sum: Any
    _upper_bounds: list[float]

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Observes values."""
        counts = Counter(map(partial(bisect_left, self._upper_bounds), amounts))
        self._sum.inc(sum(amounts))
        for at, count in counts.items():
            self._buckets[at].inc(count)


def create_files(folder: Path, worker: int | str) -> list[int]:
    """Creates the files of a worker's metrics in memory, and links to them in a folder.

    On a full disk, the client library's files would end the worker: it maps them before they have space.

    Returns:
        The descriptors of the files, which the worker inherits.
    """
    descriptors = [os.memfd_create(kind) for kind in FILE_KINDS]
    for kind, descriptor in zip(FILE_KINDS, descriptors, strict=True):
        os.ftruncate(descriptor, FILE_BYTES)
        (folder / f"{kind}_{worker}.db").symlink_to(f"/proc/self/fd/{descriptor}")
    return descriptors


def remove_gauges(folder: Path, worker: int) -> None:
    """Removes the gauges of a worker that has ended; its counters remain."""
    for file in folder.glob(f"gauge_*_{worker}.db"):
        with file.open("r+b") as gauges:
            gauges.write(bytes(4))  # the number of bytes in use


def write_metrics_to(folder: Path, worker: int) -> None:
    """Makes this process write its metrics to the files of a worker. To be called before metrics are created.

    The files are those of the number of the worker, not of the process as by default: a replacement continues
    the counts of its predecessor.
    """
    os.environ[FOLDER_VARIABLE] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]


def shared_counter(folder: Path, process: str, name: str, label: str) -> Callable[[str], Any]:
    """A counter of the workers, by a label, in files of this process, which is none of them."""
    create_files(folder, process)
    os.environ[FOLDER_VARIABLE] = str(folder)
    create = values.MultiProcessValue(lambda: process)  # type: ignore[no-untyped-call]
    return cache(lambda text: create("counter", name, f"{name}_total", [label], [text], ""))


def worker_registry(folder: Path) -> CollectorRegistry:
    """The metrics of all workers that write to a folder, added up."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return registry


PROCESS = "process"
MAX_PROCESSES = 2048


class ProcessesCollector(Collector):
    """Reads each process at every scrape: Prometheus' `process_*` metrics with the label `process`.

    They are not added up: pages that processes share, such as those of one weights file, count in the
    resident memory of each.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int | None]]) -> None:
        """Reads nothing yet.

        Args:
            pids: Returns the id of each process of the service by its name, such as `worker-0`; None for one
                that does not run.
        """
        self._pids = pids

    def collect(self) -> Iterable[Metric]:
        """The metrics of every process that is running."""
        families = dict[str, Metric]()
        for name, pid in self._pids().items():
            for metric in _collector(pid).collect() if pid is not None else ():  # what can be read
                empty = Metric(metric.name, metric.documentation, metric.type)
                family = families.setdefault(metric.name, empty)
                for sample in metric.samples:
                    family.add_sample(sample.name, {PROCESS: name}, sample.value)
        return families.values()


@lru_cache(MAX_PROCESSES)
def _collector(pid: int) -> ProcessCollector:
    """Kept, so that the start of a process is always computed from the same start of the machine."""
    return ProcessCollector(pid=lambda: pid, registry=None)
