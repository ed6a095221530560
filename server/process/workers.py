"""Several identical servers on one port: starts them, replaces those that end, and drains all of them.

Each worker has its own models, limits and metrics. What they share is the port, this process, which watches
them, the metrics endpoint, which adds theirs up, and the HTTP process.
"""

import logging
import time
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import cast, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from attention_serving.server.addresses import reserve
from attention_serving.server.errors import ServerError
from attention_serving.server.lifecycle import CANCEL_TIMEOUT_SECONDS, EXIT_SECONDS, Inbox, StopRequest
from attention_serving.server.observe.prometheus import (
    create_files,
    remove_gauges,
    shared_counter,
    worker_registry,
)
from attention_serving.server.process.supervision import Child, Event, ExitKind, HttpProcess, private_socket
from attention_serving.server.security.tls import current_certificates
from attention_serving.server.settings import Settings

log = logging.getLogger(__name__)

# How much longer than `EXIT_SECONDS` a worker may take to end: it begins to drain a moment later, and may
# have to say why it does not end.
MARGIN_SECONDS = CANCEL_TIMEOUT_SECONDS + 2.0


class Workers:
    """The supervisor of a service, with the steps and attributes of `Application`.

    Attributes:
        name: The name of this process.
        settings: Settings of the service, once bound with its port.
        certificates: Give the certificate of the next handshake of the metrics endpoint; None without TLS.
        guard: Authorises readers of the metrics; None if everyone may read them.
        registry: The metrics of all workers, added up, and those of this process.
        refusals: The counter of what the HTTP process refuses by itself, by reason.
        sockets: Where the workers listen for the HTTP process alone.
        children: The workers by their names, such as `worker-0`.
    """

    name = "supervisor"

    def __init__(self, settings: Settings, inbox: Inbox) -> None:
        """Starts nothing yet.

        Args:
            settings: Settings of the service.
            inbox: Delivers the request to stop, and what the workers report.

        Raises:
            ServerError: A certificate, the tokens file or keys of JSON Web Tokens cannot be used.
        """
        self.settings, self._inbox = settings, inbox
        self.certificates = current_certificates(settings.tls_files)
        self.guard = settings.guard() if settings.protect_metrics else None
        self.children: dict[str, Child] = {}
        self.sockets: list[Path] = []
        self._stack = ExitStack()

    def bind(self, folder: Path) -> int:
        """Reserves the port, for the workers to listen on; returns it.

        Args:
            folder: A folder for the sockets and metrics of the workers, which only this user can read.

        Raises:
            ServerError: The address is in use, or does not belong to this machine.
        """
        self._folder = folder
        reserved = [
            self._stack.enter_context(bound) for bound in reserve(self.settings.host, self.settings.port)
        ]
        port: int = reserved[0].getsockname()[1]
        self.settings = settings = self.settings.model_copy(update={"port": port})
        self.registry = worker_registry(folder)
        self.refusals = shared_counter(folder, "http", "attention_refused_requests", "reason")
        for number in range(settings.workers):
            self.sockets.append(private_socket(folder, number))
            self.children[f"worker-{number}"] = Child(
                "worker",
                "attention_serving.server.process.worker",
                (number, settings, folder),
                settings.worker_timeout_seconds,
                number,
                self._inbox.put,
                create_files(folder, number),
            )
        self._restarts = supervisor_metrics(self.registry, self.children.values())
        return port

    def refresh(self) -> None:
        """Does nothing: the workers publish their metrics with every heartbeat."""

    def load(self) -> bool:
        """Starts the workers; returns whether all of them serve, or the service was asked to stop meanwhile.

        Raises:
            ServerError: A worker ended before all of them served.
        """
        for worker in self.children.values():
            worker.start()
        while not all(worker.serves for worker in self.children.values()):
            if isinstance(message := self._inbox.wait(), StopRequest):
                log.info("draining", extra=message)
                return False
            event = cast("Event", message)
            if event.exit_kind:
                raise ServerError(event.reason)
        return True

    def start(self) -> dict[str, int]:
        """The workers serve already; returns their number, for the log."""
        return {"workers": len(self.children)}

    def drain(self, http: HttpProcess) -> None:
        """Counts the workers that are replaced until the service is asked to stop, and then drains it.

        Args:
            http: Is drained first, so that its requests arrive.
        """
        while not isinstance(message := self._inbox.wait(), StopRequest):
            event = cast("Event", message)
            if event.exit_kind:
                remove_gauges(self._folder, cast("int", event.number))
                self._restarts.labels(event.exit_kind).inc()
        log.info("draining", extra=message)
        http.drain()
        self.close()

    def close(self) -> None:
        """Drains all workers at the same time, and waits for their ends."""
        deadline = time.monotonic() + self.settings.grace_seconds + EXIT_SECONDS + MARGIN_SECONDS
        for worker in self.children.values():
            worker.drain()
        for worker in self.children.values():
            worker.close(deadline - time.monotonic())
        self._stack.close()


def supervisor_metrics(registry: CollectorRegistry, workers: Collection[Child] = ()) -> Counter:
    """Publishes the supervisor's own metrics; returns the one that counts restarts of processes."""
    states = Gauge("attention_workers", "Number of worker processes, by state.", ["state"], registry=registry)
    states.labels("ready").set_function(lambda: sum(worker.serves for worker in workers))
    states.labels("starting").set_function(lambda: sum(not worker.serves for worker in workers))
    text = "Number of worker processes that ended and were replaced, by the reason."
    restarts = Counter("attention_worker_restarts", text, ["reason"], registry=registry)
    for kind in get_args(ExitKind):
        restarts.labels(kind)
    return restarts
