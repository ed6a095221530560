"""Child processes: how a parent starts, watches, replaces and drains them, and how a child begins.

Workers and the HTTP process are children alike. A thread of the parent looks after each. They talk over a
pipe: the parent sends an assignment, then orders and pings; the child announces its states and answers.
"""

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any, NoReturn

from attention_serving.server.errors import ServerError
from attention_serving.server.shutdown import end

log = logging.getLogger(__name__)

# Parent to child: answer with a heartbeat. One is unanswered at a time.
PING = "ping"
# How often a child is pinged, in seconds; four times per timeout if the timeout is short.
PING_SECONDS = 1.0
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
# How long a process may take to exit after its pipe has closed. Then it is killed.
REAP_SECONDS = 10.0


class State(Enum):
    """State of a child. A message that carries a state announces it, or orders the child into it."""

    STOPPED = auto()  # no process is running; never sent
    LOADING = auto()  # the process loads its models; never sent
    READY = auto()  # worker to supervisor: every model has been loaded and tested
    LISTENING = auto()  # supervisor to worker: start to listen
    SERVING = auto()  # child to parent: it accepts calls
    DRAINING = auto()  # parent to child: finish the calls in progress and end


@dataclass(frozen=True)
class Heartbeat:
    """Child to parent: the answer to a ping.

    Attributes:
        responsive: Whether the thread that takes calls makes progress, if the child serves.
    """

    responsive: bool = True


@dataclass(frozen=True)
class Failure:
    """Child to parent, last: why the child cannot serve."""

    reason: str


class ExitKind(StrEnum):
    """Why a process ended, as a label of the metrics."""

    NOT_STARTED = "not_started"
    """The system could not start it."""
    EXITED = "exited"
    """It ended by itself."""
    KILLED = "killed"
    """A signal ended it."""
    UNRESPONSIVE = "unresponsive"
    """Its parent killed it because it did not answer."""


@dataclass(frozen=True)
class Exit:
    """The end of a process.

    Attributes:
        kind: Why it ended.
        reason: The same for people.
        restart_in_seconds: When the next one starts.
    """

    kind: ExitKind
    reason: str
    restart_in_seconds: float


class Watchdog:
    """Adds up how long one process has not proven that it works. Reads no clock.

    Time counts only while the parent itself runs, so that a container that was frozen as a whole does not
    lose its processes.

    Attributes:
        interval: Seconds between two pings.
        silent_seconds: How long the process has been silent.
        is_stuck: Whether its last heartbeat said that the thread that takes calls makes no progress.
    """

    def __init__(self, timeout: float) -> None:
        """Begins with a new process.

        Args:
            timeout: After how many silent seconds the process counts as failed; 0 means never.
        """
        self.interval = min(PING_SECONDS, timeout / 4) if timeout else PING_SECONDS
        self.silent_seconds = 0.0
        self.is_stuck = False
        self._timeout = timeout
        self._unanswered = False

    @property
    def failed(self) -> bool:
        """Whether the process has been silent for longer than the timeout."""
        return 0 < self._timeout < self.silent_seconds

    def elapsed(self, seconds: float) -> None:
        """Counts time that passed on the parent's clock."""
        self.silent_seconds += min(seconds, 2 * self.interval)

    def excused(self) -> None:
        """Forgets the time so far: the process need not answer now."""
        self.silent_seconds = 0.0

    def ping(self) -> bool:
        """Returns whether to send a ping: not while one is unanswered."""
        is_due, self._unanswered = not self._unanswered, True
        return is_due

    def heard(self, *, responsive: bool) -> None:
        """Notes the answer to a ping."""
        self._unanswered, self.is_stuck = False, not responsive
        if responsive:
            self.silent_seconds = 0.0


def backoff(last_seconds: float, served_seconds: float) -> float:
    """Seconds until the next process starts: twice the last ones, but within limits.

    Args:
        last_seconds: Seconds before the process that has ended; 0 before the first.
        served_seconds: How long it served. One that served for long has the shortest delay.
    """
    if served_seconds >= MAX_BACKOFF_SECONDS:
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
        report: "Callable[[Child, State | Exit], object] | None" = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Starts no process yet.

        Args:
            kind: What the child is, for the log and for reasons.
            module: Is run with the descriptor of the child's end of the pipe as its argument.
            assignment: The first message to each process.
            timeout_seconds: How long a process may leave pings unanswered; 0 sets no limit.
            number: Its number among those of its kind; None if it is alone.
            report: Is called with each state that a process announces, and with the end of each that is
                replaced, on a thread of the child. By default, the ends are logged.
            descriptors: What each process inherits.
        """
        self.number, self.state = number, State.STOPPED
        self._kind, self._module, self._assignment = kind, module, assignment
        self._timeout_seconds, self._descriptors = timeout_seconds, descriptors
        self._fields: dict[str, object] = {} if number is None else {kind: number}
        self._name = kind if number is None else f"{kind} {number}"
        self._report = report or Child.log_exit
        self._process: Popen[bytes] | None = None
        # The pipe's type has two parameters in the type stubs and none at run time.
        self._connection: Any = None
        self._failure, self._is_unresponsive, self._serving_since = "", False, math.inf
        # Guards the pipe: a descriptor that was closed is used again. It also orders `drain` and a start.
        self._lock = threading.RLock()
        self._draining = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)

    @property
    def pid(self) -> int | None:
        """Id of the process; None while there is none."""
        return self._process.pid if self._process and self.state is not State.STOPPED else None

    def start(self) -> None:
        """Starts a process, and a further one whenever it ends or does not answer, until `drain`."""
        self._thread.start()

    def listen(self) -> None:
        """Orders the process to listen, if it is ready."""
        with self._lock:
            if self.state is State.READY:
                self.state = State.LISTENING
                self._send(State.LISTENING)

    def drain(self) -> None:
        """Lets the process finish its calls and end. One that does not listen yet is killed."""
        with self._lock:
            self._draining.set()
            self._send(State.DRAINING)
            if self._process and self.state in (State.LOADING, State.READY):
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

    def log_exit(self, event: State | Exit) -> None:
        """Logs the end of a process that is replaced."""
        if isinstance(event, Exit):
            fields = {"reason": event.reason, "restart_in_seconds": event.restart_in_seconds}
            log.error("%s ended", self._kind, extra=self._fields | fields)

    def _run(self) -> None:
        """Body of the thread."""
        seconds = 0.0
        while not self._draining.is_set():
            self._failure, self._is_unresponsive, self._serving_since = "", False, math.inf
            kind, reason = self._run_once()
            if not self._draining.is_set():
                seconds = backoff(seconds, time.monotonic() - self._serving_since)
                self._report(self, Exit(kind, reason, seconds))
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
        self._watch(process)
        try:
            status = process.wait(REAP_SECONDS)
        except TimeoutExpired:
            process.kill()
            status = process.wait()
        with self._lock:
            self._connection.close()
            self._connection, self.state = None, State.STOPPED
        if self._is_unresponsive:
            return ExitKind.UNRESPONSIVE, self._failure
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
        self._connection, self.state = connection, State.LOADING
        # Arguments and environment variables would be visible to other users, and would need encoding.
        self._send(self._assignment)
        return process

    def _watch(self, process: "Popen[bytes]") -> None:
        """Receives what a process sends, and pings it, until its pipe closes."""
        watchdog, checked_at = Watchdog(self._timeout_seconds), time.monotonic()
        while True:
            if self._connection.poll(max(0.0, checked_at + watchdog.interval - time.monotonic())):
                try:
                    self._take(self._connection.recv(), watchdog)
                except (EOFError, OSError):
                    return
            else:
                seconds = time.monotonic() - checked_at
                checked_at += seconds
                # One that drains need not answer: others limit its time.
                if not self._draining.is_set() and not self._is_unresponsive:
                    self._check(process, watchdog, seconds)

    def _take(self, message: State | Heartbeat | Failure, watchdog: Watchdog) -> None:
        match message:
            case Heartbeat(responsive):
                watchdog.heard(responsive=responsive)
            case Failure(reason):
                self._failure = reason
            case State():
                self.state = message
                if message is State.SERVING:
                    self._serving_since = time.monotonic()
                self._report(self, message)

    def _check(self, process: "Popen[bytes]", watchdog: Watchdog, seconds: float) -> None:
        """Pings a process, or kills it if it has been silent for too long. Its pipe then closes.

        Before it serves, only a stopped process counts as silent: the runtime may hold the interpreter's lock
        for seconds while it loads graphs.
        """
        if self.state is State.SERVING or _is_stopped(process.pid):
            watchdog.elapsed(seconds)
        else:
            watchdog.excused()
        if watchdog.failed:
            self._is_unresponsive = True
            what = "took no calls" if watchdog.is_stuck else "did not answer"
            self._failure = f"{self._name} {what} for {watchdog.silent_seconds:.1f} s and was killed"
            process.kill()
        elif watchdog.ping():
            self._send(PING)

    def _send(self, message: object) -> None:
        with self._lock, suppress(OSError):  # it has exited; the closed pipe reports that too
            if self._connection is not None:
                self._connection.send(message)


def _is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped a child."""
    try:
        return bool(os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT))
    except ChildProcessError:  # it has exited, and its status was read
        return False


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
            connection.send(Failure(str(error)))
        end(1)
    except Exception:
        log.exception("failed")
        end(1)
    end(0)
