"""The HTTP process as its parent sees it: a server, or the supervisor of several."""

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from server.http.listener import listen
from server.http.options import HttpOptions

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
# How long requests whose bodies are on their way may still reach the gRPC server before that drains too.
ARRIVING_SECONDS = 1.0


class HttpProcess:
    """Holds the port; starts the process, starts it again if it ends, and stops it.

    Attributes:
        port: The port, chosen by the system for port 0.
    """

    def __init__(self, options: HttpOptions, host: str, port: int) -> None:
        """Listens. Connections wait in the operating system's queue until `start`, and between processes.

        Args:
            options: What the process does.
            host: Address or host name.
            port: 0 selects a free port.

        Raises:
            BindError: The address is in use, or does not belong to this machine.
        """
        self._options = options
        self._sockets = listen(host, port)
        self.port: int = self._sockets[0].getsockname()[1]
        self._stopping = threading.Event()
        # Set while no process serves.
        self._quiet = threading.Event()
        self._quiet.set()
        # Guards the process and its pipe.
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        # The pipe's type has two parameters in the type stubs and none at run time.
        self._connection: Any = None
        self._watch: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None while there is none."""
        return self._process.pid if self._process and self._process.returncode is None else None

    def start(self) -> None:
        """Starts the process, and a thread that starts it again whenever it ends."""
        self._watch = threading.Thread(target=self._run, name="http", daemon=True)
        self._watch.start()

    def drain(self) -> None:
        """Stops listening. The process answers what is in progress, and ends.

        Returns when it has answered, or when its requests have had the time to reach the gRPC server.
        """
        with self._lock:
            self._stopping.set()
            if self._connection is not None:
                with suppress(OSError):  # it has ended
                    self._connection.send("stop")
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
        if self._watch.is_alive() and self._process is not None:
            log.error("http process killed: it did not end in time", extra={"seconds": seconds})
            self._process.kill()
            self._watch.join()

    def _run(self) -> None:
        """Body of the thread."""
        backoff = FIRST_BACKOFF_SECONDS
        while not self._stopping.is_set():
            started = time.monotonic()
            reason = self._run_once()
            if self._stopping.is_set():
                return
            if time.monotonic() - started >= MAX_BACKOFF_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            fields = {"port": self.port, "reason": reason, "restart_in_seconds": backoff}
            log.error("http process ended", extra=fields)
            self._stopping.wait(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    def _run_once(self) -> str:
        """Runs one process to its end; returns how it ended."""
        try:
            with self._lock:
                if self._stopping.is_set():
                    return ""
                process, connection = self._spawn()
        except OSError as error:
            return f"it could not be started: {error.strerror}"
        log.info("http process started", extra={"port": self.port, "pid": process.pid})
        with suppress(EOFError, OSError):
            connection.recv()  # it sends nothing, and closes the pipe when it has answered or ends
        self._quiet.set()
        status = self._reap(process)
        with self._lock:
            self._connection = None
            connection.close()
        return f"it was killed by signal {-status}" if status < 0 else f"it ended with status {status}"

    def _spawn(self) -> tuple["Popen[bytes]", Any]:
        """Starts a process and sends it its options; returns it and the parent's end of its pipe."""
        sockets = [each.fileno() for each in self._sockets]
        connection, childs_end = Pipe()
        with childs_end:
            descriptor = childs_end.fileno()
            command = [sys.executable, "-m", "server.http.child", str(descriptor)]
            # In its own process group: of the signals that a terminal sends to a group, only the parent
            # receives one, and it drains this process.
            process = Popen(  # noqa: S603
                command, stdin=DEVNULL, pass_fds=[descriptor, *sockets], process_group=0, env=_environment()
            )
        self._process, self._connection = process, connection
        self._quiet.clear()
        with suppress(OSError):  # it has ended; the closed pipe reports that too
            connection.send((self._options, sockets))
        return process, connection

    def _reap(self, process: "Popen[bytes]") -> int:
        try:
            return process.wait(MAX_BACKOFF_SECONDS)
        except TimeoutExpired:  # it closed the pipe and goes on
            process.kill()
            return process.wait()


def _environment() -> dict[str, str]:
    """The parent's, without the folder of the workers' metrics: this process has none."""
    return {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
