"""The HTTP process as its parent sees it: a server, or the supervisor of several."""

import logging
import os
import threading
import time

from attention_serving.server.child_process import ChildProcess, State
from attention_serving.server.http.listener import listen
from attention_serving.server.http.options import HttpOptions

log = logging.getLogger(__name__)

# How long requests whose bodies are on their way may still reach the gRPC server before that drains too.
ARRIVING_SECONDS = 1.0


class HttpProcess:
    """Holds the port; starts the process, starts it again if it ends, and stops it.

    Attributes:
        port: The port, chosen by the system for port 0.
    """

    def __init__(self, options: HttpOptions, host: str, port: int, *, timeout_seconds: float = 0.0) -> None:
        """Listens. Connections wait in the operating system's queue until `start`, and between processes.

        Args:
            options: What the process does.
            host: Address or host name.
            port: 0 selects a free port.
            timeout_seconds: How long the process may leave pings unanswered before it is killed and replaced.
                0 sets no limit.

        Raises:
            BindError: The address is in use, or does not belong to this machine.
        """
        self._sockets = listen(host, port)
        self.port: int = self._sockets[0].getsockname()[1]
        self._stopping = threading.Event()
        # Set while no process serves.
        self._quiet = threading.Event()
        self._quiet.set()
        # No process is started once `drain` has told the last one.
        self._starting = threading.Lock()
        descriptors = [each.fileno() for each in self._sockets]
        self._child = ChildProcess(
            "it",
            "attention_serving.server.http.child",
            (options, descriptors),
            timeout_seconds,
            descriptors=descriptors,
            environment=_environment(),
        )
        self._watch: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None while there is none."""
        return self._child.pid if self._child.connection is not None else None

    def start(self) -> None:
        """Starts the process, and a thread that starts it again whenever it ends or does not answer."""
        self._watch = threading.Thread(target=self._run, name="http", daemon=True)
        self._watch.start()

    def drain(self) -> None:
        """Stops listening. The process answers what is in progress, and ends.

        Returns when it has answered, or when its requests have had the time to reach the gRPC server.
        """
        with self._starting:
            self._stopping.set()
            self._child.send(State.DRAINING)
        for each in self._sockets:
            each.close()
        if self._watch is not None:
            self._quiet.wait(ARRIVING_SECONDS)

    def close(self, seconds: float) -> None:
        """Drains, and kills the process if it has not ended after a time."""
        self.drain()
        if self._watch is None:
            return
        self._watch.join(seconds)
        if self._watch.is_alive():
            log.error("http process killed: it did not end in time", extra={"seconds": seconds})
            self._child.kill()
            self._watch.join()

    def _run(self) -> None:
        """Body of the thread."""
        while not self._stopping.is_set():
            reason = self._run_once()
            if self._stopping.is_set():
                return
            seconds = self._child.backoff()
            fields = {"port": self.port, "reason": reason, "restart_in_seconds": seconds}
            log.error("http process ended", extra=fields)
            self._stopping.wait(seconds)

    def _run_once(self) -> str:
        """Runs one process to its end; returns how it ended."""
        child = self._child
        try:
            with self._starting:
                if self._stopping.is_set():
                    return ""
                child.start()
                self._quiet.clear()
        except OSError as error:
            return f"it could not be started: {error.strerror}"
        log.info("http process started", extra={"port": self.port, "pid": child.pid})
        checked_at = time.monotonic()
        while True:
            due = checked_at + child.watchdog.interval - time.monotonic()
            if child.connection.poll(max(0.0, due)):
                if not child.receive():  # it has answered or ended
                    break
            elif not self._stopping.is_set():  # while it drains, it need not answer
                seconds = time.monotonic() - checked_at
                checked_at += seconds
                child.check(seconds)
            else:
                checked_at = time.monotonic()
        self._quiet.set()
        return child.reap().reason


def _environment() -> dict[str, str]:
    """The parent's, without the folder of the workers' metrics: this process has none."""
    return {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
