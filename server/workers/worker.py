"""One of several server processes: `python -m server.workers.worker DESCRIPTOR`, run by a supervisor."""

import logging
import os
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from server import application, logs
from server.engine.repository import RepositoryError
from server.errors import BindError
from server.metrics import Metrics
from server.workers import metrics
from server.workers.assignment import Assignment, Failure, Word

log = logging.getLogger(__name__)
# The pipe's own type has two parameters in the stubs and none in the library.
Link = Any


class Supervised:
    """Surroundings of a server that listens when its supervisor says so and stops when the pipe ends.

    The pipe ends when the supervisor wants the worker to drain, and when the supervisor is no more: no worker
    outlives it, however it ended.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._decided = threading.Event()

    def loaded(self, metrics: Metrics, stop: threading.Event) -> None:  # noqa: ARG002 - they go to files
        """Waits for the word to listen, or the end."""
        threading.Thread(target=self._follow, args=(stop,), name="supervisor", daemon=True).start()
        self._tell(Word.READY)
        self._decided.wait()

    def serving(self, port: int, *, ready: int, failed: int) -> None:
        """Tells the supervisor."""
        log.info("listening", extra={"port": port, "models": ready, "failed": failed})
        self._tell(Word.SERVING)

    def close(self) -> None:
        """Nothing is left to be closed."""

    def _follow(self, stop: threading.Event) -> None:
        try:
            while self._link.recv() is Word.LISTEN:
                self._decided.set()
        except (EOFError, OSError):
            log.info("draining", extra={"reason": "the supervisor ended the pipe"})
            stop.set()
            self._decided.set()

    def _tell(self, message: Word) -> None:
        with suppress(OSError):  # the supervisor is no more, which the pipe's end says, too
            self._link.send(message)


def main() -> int:
    """Serves as the supervisor says; returns the process's exit status."""
    link = Connection(int(sys.argv[1]))
    os.set_inheritable(link.fileno(), False)  # noqa: FBT003 - by position alone
    try:
        assignment: Assignment = link.recv()
    except EOFError:
        return 0
    _settle(assignment)
    try:
        application.run(assignment.settings, Supervised(link))
    except (BindError, RepositoryError) as error:
        with suppress(OSError):
            link.send(Failure(str(error)))
        return 1
    return 0


def _settle(assignment: Assignment) -> None:
    """Comes before any thread of the runtime's, which would not move, and before any metric."""
    logs.configure(assignment.settings.log_level, worker=assignment.worker)
    metrics.write_to(assignment.metrics, assignment.worker)
    try:
        os.sched_setaffinity(0, assignment.cores)
    except OSError as error:  # the cores that the container may use have changed since the start
        log.warning("not bound to its cores", extra={"reason": error.strerror})


if __name__ == "__main__":
    sys.exit(main())
