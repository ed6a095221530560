"""Several server processes on one port: starts them together, replaces those that die, drains them."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from server import cores
from server.errors import WorkerError
from server.settings import Settings
from server.workers.assignment import Assignment, Word
from server.workers.member import Member
from server.workers.metrics import FleetMetrics
from server.workers.reservation import reserved

log = logging.getLogger(__name__)


def run(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, and returns when the workers have answered every accepted call.

    Raises:
        BindError: An address cannot be listened on.
        WorkerError: A worker ended before all of them served.
    """
    signals, arrived = Pipe(duplex=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        # The loop waits for pipes; what a handler does beside writing to one could meet the loop half-way.
        signal.signal(number, lambda number, _frame: arrived.send(number))
    with (
        _temporary_folder() as folder,
        reserved(settings.host, settings.port) as port,
        closing(FleetMetrics(folder, settings.host, settings.metrics_port)) as metrics,
    ):
        Supervisor(settings.model_copy(update={"port": port}), folder, metrics, signals).run()
    log.info("stopped")


class Supervisor:
    """Watches the workers from their start to their end."""

    def __init__(self, settings: Settings, folder: Path, metrics: FleetMetrics, signals: Any) -> None:
        self._settings = settings
        self._metrics = metrics
        self._signals = signals
        self._members = [Member(assignment) for assignment in assignments(settings, folder)]
        self._stopping = False
        # All have been ready: from now on each listens as soon as it is. All have served: it is a service.
        self._opened = self._served = False

    def run(self) -> None:
        """Returns when no worker is left.

        Raises:
            WorkerError: A worker ended before all of them served.
        """
        try:
            for member in self._members:
                self._start(member)
            while not self._stopping:
                self._proceed()
                self._wait()
        finally:
            for member in self._members:
                member.drain()
            for member in self._members:
                member.wait()

    def _wait(self) -> None:
        """Until there is a message, an end, a signal, or a process to start."""
        members = {member.link: member for member in self._members if member.link}
        dues = [member.due for member in self._members if member.due is not None]
        patience = max(0.0, min(dues) - time.monotonic()) if dues else None
        heard = wait([self._signals, *members], patience)
        if self._signals in heard:
            self._stopping = True
            log.info("draining", extra={"signal": signal.Signals(self._signals.recv()).name})
            return
        for member in map(members.get, heard):
            if member and not member.hear():
                self._ended(member)
        for member in self._members:
            if member.due is not None and member.due <= time.monotonic():
                self._start(member)

    def _start(self, member: Member) -> None:
        try:
            member.start()
        except OSError as error:
            self._replace(member, f"no process could be started: {error.strerror}")
        else:
            log.info("worker started", extra={"worker": member.number, "pid": member.pid})

    def _ended(self, member: Member) -> None:
        reason = member.bury()
        self._metrics.ended(member.number)
        self._replace(member, reason)

    def _replace(self, member: Member, reason: str) -> None:
        if not self._served:
            raise WorkerError(reason)
        seconds = member.postpone()
        log.error(
            "worker ended",
            extra={"worker": member.number, "reason": reason, "next_in_seconds": seconds},
        )

    def _proceed(self) -> None:
        words = [member.word for member in self._members]
        self._opened = self._opened or words.count(Word.READY) == len(words)
        for member in self._members if self._opened else ():
            if member.word is Word.READY:
                member.listen()
        serving = words.count(Word.SERVING)
        self._metrics.count(ready=serving, starting=len(words) - serving)
        if not self._served and serving == len(words):
            self._served = True
            where = {"port": self._settings.port, "metrics_port": self._metrics.port}
            log.info("serving", extra={"host": self._settings.host, "workers": len(words), **where})


def assignments(settings: Settings, folder: Path) -> Iterator[Assignment]:
    """What each worker serves with: its own cores, and as many threads as its part of the quota allows."""
    allowed = sorted(os.sched_getaffinity(0))
    # The whole affinity is split, the quota only counts threads: cores that a quota leaves idle are any of
    # them, and containers that all chose the first ones would crowd there.
    threads = range(cores.available())
    for worker in range(settings.workers):
        own = settings.threads or len(cores.share(threads, settings.workers, worker))
        yield Assignment(
            worker=worker,
            settings=settings.model_copy(update={"threads": own}),
            cores=frozenset(cores.share(allowed, settings.workers, worker)),
            metrics=folder,
        )


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        folder = TemporaryDirectory(prefix="attention-metrics-")
    except OSError as error:
        raise WorkerError(f"the workers' metrics need a temporary folder: {error.strerror}") from error
    with folder as name:
        yield Path(name)
