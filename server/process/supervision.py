"""Child processes: how a parent starts, watches, replaces and drains them.

Workers and the HTTP process are children. Each has a thread in its parent. Over a pipe, a child receives what
it is to do, and announces again and again that it serves. SIGTERM drains it, and so does the end of the pipe:
it does not outlive its parent. `server.lifecycle` has the child's part.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, Literal, TypeAlias

from attention_serving.server.addresses import listen
from attention_serving.server.lifecycle import HEARTBEAT_SECONDS
from attention_serving.server.settings import Settings

log = logging.getLogger(__name__)
# How long after its end a process is replaced, at first and at most: one that cannot load must not use the
# processor all the time.
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 30.0
# How long a child may take to end that has nothing left to do.
IDLE_EXIT_SECONDS = 2.0
# How long HTTP requests whose bodies are on their way may still reach the gRPC server before that drains too.
ARRIVING_SECONDS = 1.0

# Why a process ended, as a label of the metrics: the system could not start it, it ended by itself, a signal
# ended it, or its parent killed it because it did not announce that it serves.
ExitKind: TypeAlias = Literal["not_started", "exited", "killed", "unresponsive"]
# The number of a child, and why its process ended, also as a text; None and "" if it began to serve.
Event: TypeAlias = tuple[int | None, ExitKind | None, str]


def backoff(last_seconds: float, lived_seconds: float) -> float:
    """Seconds until the next process starts: twice the last ones, within limits.

    Args:
        last_seconds: Seconds before the process that has ended; 0 before the first.
        lived_seconds: How long it lived. One that lived for long has the shortest delay.
    """
    if lived_seconds >= MAX_BACKOFF_SECONDS:
        return FIRST_BACKOFF_SECONDS
    return min(max(2 * last_seconds, FIRST_BACKOFF_SECONDS), MAX_BACKOFF_SECONDS)


@dataclass(eq=False)
class Child:
    """One child of this process, over all processes that run as it one after another. For any thread.

    Attributes:
        kind: What the child is, for the log and for reasons.
        module: Is run with the descriptor of the child's end of the pipe as its argument.
        assignment: The only message to each process.
        timeout_seconds: How long a process that serves may be silent; 0 sets no limit.
        number: Its number among those of its kind; None if it is alone.
        report: Is called on a thread of the child when a process begins to serve, and when one has ended that
            is replaced.
        descriptors: What each process inherits.
        refusals: The counter of what it refuses by itself, by reason, if it does.
        variables: Environment variables of each process, beside those of this one.
        pid: Id of the process; None while there is none.
        serves: Whether it accepts calls.
        ended: Is set before `start`, and once the last process has ended after `drain`.
    """

    kind: str
    module: str
    assignment: object
    timeout_seconds: float
    number: int | None = None
    report: Callable[[Event], object] = lambda _: None
    descriptors: Sequence[int] = ()
    refusals: Callable[[str], Any] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = field(default=None, init=False)
    serves: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._fields: dict[str, object] = {} if self.number is None else {self.kind: self.number}
        self._name = " ".join([self.kind, *map(str, self._fields.values())])
        self._process: Popen[bytes] | None = None
        self._draining, self.ended = threading.Event(), threading.Event()
        self.ended.set()

    def start(self) -> None:
        """Starts a process, and a further one whenever it ends or is silent, until `drain`."""
        self.ended.clear()
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def drain(self) -> None:
        """Lets the process finish its calls and end."""
        self._draining.set()
        if self._process:  # it may have ended
            self._process.terminate()

    def close(self, seconds: float = IDLE_EXIT_SECONDS) -> None:
        """Drains, and kills the process if it has not ended after a time."""
        self.drain()
        if not self.ended.wait(seconds) and self._process:
            log.error("%s killed: it did not end in time", self.kind, extra=self._fields)
            self._process.kill()
            self.ended.wait()

    def _run(self) -> None:
        """Body of the thread."""
        seconds = 0.0
        while not self._draining.is_set():
            started = time.monotonic()
            kind, reason = self._run_once()
            if not self._draining.is_set():
                seconds = backoff(seconds, time.monotonic() - started)
                fields = {"reason": reason, "restart_in_seconds": seconds}
                log.warning("%s ended", self.kind, extra=self._fields | fields)
                self.report((self.number, kind, reason))
                self._draining.wait(seconds)
        self.ended.set()

    def _run_once(self) -> tuple[ExitKind, str]:
        """Runs one process to its end; returns why it ended, for metrics and for people."""
        try:
            process, connection = self._spawn()
        except OSError as error:
            return "not_started", f"{self._name} could not be started: {error.strerror}"
        self._process, self.pid = process, process.pid
        if self._draining.is_set():  # since the last look
            process.terminate()
        log.info("%s started", self.kind, extra=self._fields | {"pid": self.pid})
        with connection:
            is_silent, failure = self._watch(process, connection)
        status = process.wait()
        self.pid, self.serves = None, False
        if is_silent:
            return "unresponsive", failure
        if status < 0:
            return "killed", failure or f"{self._name} was killed by signal {-status}"
        return "exited", failure or f"{self._name} ended with status {status}"

    def _spawn(self) -> tuple["Popen[bytes]", Any]:
        """Starts a process; returns it with this end of the pipe to it.

        Raises:
            OSError: The system cannot start a process.
        """
        connection, childs_end = Pipe()
        # Arguments and environment variables would be visible to other users, and would need encoding. The
        # pipe's buffer is larger than any assignment.
        connection.send(self.assignment)
        with childs_end:
            descriptor = childs_end.fileno()
            command = [sys.executable, "-m", self.module, str(descriptor)]
            # In its own process group: of the signals that a terminal sends to a group, only the parent
            # receives one, and it drains the children.
            process = Popen(  # noqa: S603
                command,
                stdin=DEVNULL,
                pass_fds=[descriptor, *self.descriptors],
                process_group=0,
                env=os.environ | self.variables,
            )
        return process, connection

    def _watch(self, process: "Popen[bytes]", connection: Any) -> tuple[bool, str]:
        """Receives what a process sends until its pipe closes; kills one that is silent while it serves.

        Returns whether it was killed, and why it cannot serve. Silence is counted while this process runs, so
        that a container that was frozen as a whole does not lose its processes. Before a process serves, the
        runtime may hold the interpreter's lock for long; while it drains, others limit its time.
        """
        silent_seconds, failure = 0.0, ""
        with suppress(EOFError, OSError):
            while not 0 < self.timeout_seconds <= silent_seconds:
                if connection.poll(HEARTBEAT_SECONDS):
                    silent_seconds, message = 0.0, connection.recv()
                    if isinstance(message, str):
                        failure = message
                    else:
                        self._take_announcement(message)
                elif self.serves and not self._draining.is_set():
                    silent_seconds += HEARTBEAT_SECONDS
            process.kill()
            return True, f"{self._name} did not answer for {self.timeout_seconds:g} s and was killed"
        return False, failure

    def _take_announcement(self, refusals: Mapping[str, int]) -> None:
        """The process serves, and has refused some requests by itself since it last announced so."""
        if self.refusals is not None:
            for reason, count in refusals.items():
                self.refusals(reason).inc(count)
        if not self.serves:
            self.serves = True
            self.report((self.number, None, ""))


def private_socket(folder: Path, worker: int) -> Path:
    """Where a worker, or the only server, listens for the HTTP process alone."""
    return folder / f"grpc-{worker}"


class HttpProcess(Child):
    """The HTTP process and its port, which stays bound between processes. Neither exists if HTTP is off.

    It runs `server.http.server`, and reaches the gRPC server through a Unix domain socket which only this
    user can connect to, one for each worker: such calls need no certificate, and the server believes what
    they say about the client.

    Attributes:
        ports: The port as a field of the log; empty if HTTP is off.
    """

    def __init__(self, settings: Settings, folder: Path, refusals: Callable[[str], Any]) -> None:
        """Listens. Connections wait in the operating system's queue until `start`, and between processes.

        Args:
            settings: Settings of the server.
            folder: Has the private socket of each gRPC server.
            refusals: The counter of what the process refuses by itself, by reason.

        Raises:
            ServerError: The address is in use, or does not belong to this machine.
        """
        self._sockets = [] if settings.http_port is None else listen(settings.host, settings.http_port)
        self.ports = {"http_port": self._sockets[0].getsockname()[1]} if self._sockets else {}
        targets = [f"unix:{private_socket(folder, worker)}" for worker in range(settings.workers)]
        descriptors = [listener.fileno() for listener in self._sockets]
        super().__init__(
            "http process",
            "attention_serving.server.http.server",
            (settings, targets, descriptors),
            settings.worker_timeout_seconds,
            descriptors=descriptors,
            refusals=refusals,
        )

    def drain(self) -> None:
        """Stops listening. The process answers what is in progress, and ends.

        Returns when it has answered, or when its requests have had the time to reach the gRPC server.
        """
        super().drain()
        for listener in self._sockets:
            listener.close()
        self.ended.wait(ARRIVING_SECONDS)
