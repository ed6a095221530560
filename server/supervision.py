"""Child processes: how a parent starts, watches, replaces and drains them, and how a child begins.

Workers and the HTTP process are children alike. A thread of the parent looks after each. They talk over a
pipe: the parent sends an assignment and then orders, and the child announces its state again and again.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, StrEnum, auto
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen
from typing import Any, NoReturn

from attention_serving.server.errors import ServerError
from attention_serving.server.shutdown import end

log = logging.getLogger(__name__)

# How often a child that serves announces so, in seconds, as long as it takes calls.
HEARTBEAT_SECONDS = 1.0
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0


class State(Enum):
    """State of a child, which announces READY and SERVING itself."""

    STOPPED = auto()  # no process is running
    LOADING = auto()  # the process loads its models
    READY = auto()  # every model of a worker has been loaded and tested
    SERVING = auto()  # it accepts calls


class Order(Enum):
    """What a parent asks of a child."""

    LISTEN = auto()  # start to accept calls
    DRAIN = auto()  # finish the calls in progress and end


class ExitKind(StrEnum):
    """Why a process ended, as a label of the metrics."""

    NOT_STARTED = "not_started"  # the system could not start it
    EXITED = "exited"  # it ended by itself
    KILLED = "killed"  # a signal ended it
    UNRESPONSIVE = "unresponsive"  # its parent killed it because it did not announce that it serves


def backoff(last_seconds: float, lived_seconds: float) -> float:
    """Seconds until the next process starts: twice the last ones, but within limits.

    Args:
        last_seconds: Seconds before the process that has ended; 0 before the first.
        lived_seconds: How long it lived. One that lived for long has the shortest delay.
    """
    if lived_seconds >= MAX_BACKOFF_SECONDS:
        return FIRST_BACKOFF_SECONDS
    return min(max(2 * last_seconds, FIRST_BACKOFF_SECONDS), MAX_BACKOFF_SECONDS)


class Child:
    """One child of this process, over all processes that run as it one after another. For any thread.

    Attributes:
        number: Its number among those of its kind; None if it is alone.
        state: State of the process.
    """

    def __init__(
        self,
        kind: str,
        module: str,
        assignment: object,
        timeout_seconds: float,
        *,
        number: int | None = None,
        report: "Callable[[Child, State | ExitKind, str], object]" = lambda *_: None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Starts no process yet.

        Args:
            kind: What the child is, for the log and for reasons.
            module: Is run with the descriptor of the child's end of the pipe as its argument.
            assignment: The first message to each process.
            timeout_seconds: How long a process that serves may be silent; 0 sets no limit.
            number: Its number among those of its kind; None if it is alone.
            report: Is called with each new state of a process, and with the end of each that is replaced and
                its reason, on a thread of the child.
            descriptors: What each process inherits.
        """
        self.number, self.state = number, State.STOPPED
        self._kind, self._module, self._assignment = kind, module, assignment
        self._timeout_seconds, self._descriptors = timeout_seconds, descriptors
        self._fields: dict[str, object] = {} if number is None else {kind: number}
        self._name = kind if number is None else f"{kind} {number}"
        self._report = report
        self._process: Popen[bytes] | None = None
        # The pipe's type has two parameters in the type stubs and none at run time.
        self._connection: Any = None
        self._failure = ""
        # Guards the pipe: a descriptor that was closed is used again. It also orders `drain` and a start.
        self._lock = threading.RLock()
        self._draining = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)

    @property
    def pid(self) -> int | None:
        """Id of the process; None while there is none."""
        return self._process.pid if self._process and self.state is not State.STOPPED else None

    def start(self) -> None:
        """Starts a process, and a further one whenever it ends or is silent, until `drain`."""
        self._thread.start()

    def send(self, message: object) -> None:
        """Sends an order to the process, if there is one."""
        with self._lock, suppress(OSError):  # it has exited; the closed pipe reports that too
            if self._connection is not None:
                self._connection.send(message)

    def drain(self) -> None:
        """Lets the process finish its calls and end. One that loads models is killed."""
        with self._lock:
            self._draining.set()
            self.send(Order.DRAIN)
            if self._process and self.state is State.LOADING:  # which may take long, and no call is lost
                self._process.kill()

    def join(self, seconds: float) -> bool:
        """Waits for the end of the process after `drain`; returns whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(min(max(0.0, seconds), threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def close(self, seconds: float) -> None:
        """Drains, and kills the process if it has not ended after a time."""
        self.drain()
        if not self.join(seconds) and self._process:
            log.error("%s killed: it did not end in time", self._kind, extra=self._fields)
            self._process.kill()
            self._thread.join()

    def _run(self) -> None:
        """Body of the thread."""
        seconds = 0.0
        while not self._draining.is_set():
            started = time.monotonic()
            kind, reason = self._run_once()
            if not self._draining.is_set():
                seconds = backoff(seconds, time.monotonic() - started)
                fields = {"reason": reason, "restart_in_seconds": seconds}
                log.warning("%s ended", self._kind, extra=self._fields | fields)
                self._report(self, kind, reason)
                self._draining.wait(seconds)

    def _run_once(self) -> tuple[ExitKind, str]:
        """Runs one process to its end; returns why it ended, for metrics and for people."""
        with self._lock:
            if self._draining.is_set():
                return ExitKind.NOT_STARTED, ""
            try:
                process = self._process = self._spawn()
            except OSError as error:
                return ExitKind.NOT_STARTED, f"{self._name} could not be started: {error.strerror}"
        log.info("%s started", self._kind, extra=self._fields | {"pid": process.pid})
        is_silent = self._watch(process)
        status = process.wait()
        with self._lock:
            self._connection.close()
            self._connection, self.state = None, State.STOPPED
        if is_silent:
            reason = f"{self._name} did not answer for {self._timeout_seconds:g} s and was killed"
            return ExitKind.UNRESPONSIVE, reason
        if status < 0:
            return ExitKind.KILLED, self._failure or f"{self._name} was killed by signal {-status}"
        return ExitKind.EXITED, self._failure or f"{self._name} ended with status {status}"

    def _spawn(self) -> "Popen[bytes]":
        """Starts a process and sends it the assignment.

        Raises:
            OSError: The system cannot start a process.
        """
        connection, childs_end = Pipe()
        with childs_end:
            descriptor = childs_end.fileno()
            # In its own process group: of the signals that a terminal sends to a group, only the parent
            # receives one, and it drains the children.
            process = Popen(  # noqa: S603
                [sys.executable, "-m", self._module, str(descriptor)],
                stdin=DEVNULL,
                pass_fds=[descriptor, *self._descriptors],
                process_group=0,
            )
        self._connection, self.state, self._failure = connection, State.LOADING, ""
        # Arguments and environment variables would be visible to other users, and would need encoding.
        self.send(self._assignment)
        return process

    def _watch(self, process: "Popen[bytes]") -> bool:
        """Receives what a process sends until its pipe closes; kills one that is silent while it serves.

        Returns whether it was killed. Silence is counted while this process runs, so that a container that
        was frozen as a whole does not lose its processes. Before a process serves, the runtime may hold the
        interpreter's lock for long; while it drains, others limit its time.
        """
        silent_seconds = 0.0
        with suppress(EOFError, OSError):
            while True:
                if self._connection.poll(HEARTBEAT_SECONDS):
                    silent_seconds = 0.0
                    self._take(self._connection.recv())
                elif self.state is State.SERVING and not self._draining.is_set():
                    silent_seconds += HEARTBEAT_SECONDS
                    if 0 < self._timeout_seconds <= silent_seconds:
                        process.kill()
                        return True
        return False

    def _take(self, message: State | str) -> None:
        if isinstance(message, str):  # why the process cannot serve
            self._failure = message
        elif message is not self.state:
            self.state = message
            self._report(self, message, "")


def run_child(serve: Callable[[Any, Any], None]) -> NoReturn:
    """Runs the program of a child, and ends the process.

    Args:
        serve: Is called with the child's end of the pipe and the assignment. Why it cannot serve, as a
            `ServerError`, is sent to the parent.
    """
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)  # noqa: FBT003 - takes no keyword
    try:
        assignment = connection.recv()
    except EOFError:
        end(0)
    try:
        serve(connection, assignment)
    except ServerError as error:
        with suppress(OSError):  # the parent has ended
            connection.send(str(error))
        end(1)
    except Exception:
        log.exception("failed")
        end(1)
    end(0)
