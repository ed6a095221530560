"""A child process as its parent sees it, over all processes that run as this child one after another."""

import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from multiprocessing import Pipe
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from attention_serving.server.watchdog import Watchdog

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
# How long a process may take to exit after its pipe has closed. Then it is killed.
EXIT_SECONDS = 10.0


class State(Enum):
    """State of a child. A message that carries a state announces it, or orders the child into it."""

    STOPPED = auto()  # no process is running; never sent
    LOADING = auto()  # the process loads its models; never sent
    READY = auto()  # worker to supervisor: every model has been loaded and tested
    LISTENING = auto()  # supervisor to worker: start to listen
    SERVING = auto()  # child to parent: it accepts calls
    DRAINING = auto()  # parent to child: finish the calls in progress and end


@dataclass(frozen=True)
class Ping:
    """Parent to child: answer with a heartbeat. One is unanswered at a time."""


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
    """The end of a process: its kind, and the reason for people."""

    kind: ExitKind
    reason: str


class ChildProcess:
    """Starts, watches, replaces and reaps one child. All methods run on one thread, `send` on any.

    Attributes:
        watchdog: Judges whether the process answers.
        state: State of the process.
        connection: The parent's end of the pipe; None while no process is running.
        restart_at: When the next process is to start, on the clock `time.monotonic`; None unless one is due.
    """

    def __init__(
        self,
        name: str,
        module: str,
        assignment: object,
        timeout_seconds: float,
        *,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts no process yet.

        Args:
            name: What reasons call the child.
            module: Is run with the descriptor of the child's end of the pipe as its argument.
            assignment: The first message to each process.
            timeout_seconds: How long a process may leave pings unanswered; 0 sets no limit.
            descriptors: What each process inherits.
            environment: Its variables; None for those of the parent.
        """
        self._name, self._module, self._assignment = name, module, assignment
        self._descriptors, self._environment = descriptors, environment
        self.watchdog = Watchdog(timeout_seconds)
        self.state = State.STOPPED
        # The pipe's type has two parameters in the type stubs and none at run time.
        self.connection: Any = None
        self.restart_at: float | None = None
        # Guards the pipe: a descriptor that was closed is used again.
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        self._failure = ""
        self._is_unresponsive = False
        self._next_backoff = FIRST_BACKOFF_SECONDS
        self._serving_since: float | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the last process; None before the first."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts a process and sends it the assignment.

        Raises:
            OSError: The system cannot start a process.
        """
        self.state, self.restart_at, self._failure, self._serving_since = State.STOPPED, None, "", None
        self._is_unresponsive = False
        self.watchdog.reset()
        connection, childs_end = Pipe()
        with childs_end:
            descriptor = childs_end.fileno()
            # In its own process group: of the signals that a terminal sends to a group, only the parent
            # receives one, and it drains the children.
            self._process = Popen(  # noqa: S603
                [sys.executable, "-m", self._module, str(descriptor)],
                stdin=DEVNULL,
                pass_fds=[descriptor, *self._descriptors],
                process_group=0,
                env=self._environment,
            )
        self.connection, self.state = connection, State.LOADING
        # Arguments and environment variables would be visible to other users, and would need encoding.
        self.send(self._assignment)

    def receive(self) -> bool:
        """Receives one message; returns False if the pipe has closed instead."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, Heartbeat):
            self.watchdog.heard(responsive=message.responsive)
        elif isinstance(message, Failure):
            self._failure = message.reason
        else:
            self.state = message
        if message is State.SERVING:
            self._serving_since = time.monotonic()
        return True

    def check(self, seconds: float) -> bool:
        """Pings the process, or kills it if it has been silent for too long; returns whether it was killed.

        Before it serves, only a stopped process counts as silent: the runtime may hold the interpreter's lock
        for seconds while it loads graphs.

        Args:
            seconds: Time since the last check.
        """
        if not self._process or not self.connection or self._is_unresponsive:
            return False
        if self.state is State.SERVING or _is_stopped(self._process.pid):
            self.watchdog.elapsed(seconds)
        else:
            self.watchdog.excused()
        if self.watchdog.failed:
            self._is_unresponsive = True
            what = "took no calls" if self.watchdog.is_stuck else "did not answer"
            self._failure = f"{self._name} {what} for {self.watchdog.silent_seconds:.1f} s and was killed"
            self._process.kill()
        elif self.watchdog.ping():
            self.send(Ping())
        return self._is_unresponsive

    def reap(self) -> Exit:
        """Waits for the exit of a process whose pipe has closed."""
        self.wait(time.monotonic() + EXIT_SECONDS)
        status = self._process.returncode if self._process else 0
        with self._lock:
            self.connection.close()
            self.connection, self.state = None, State.STOPPED
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        kind = ExitKind.KILLED if status < 0 else ExitKind.EXITED
        reason = self._failure or f"{self._name} {how}"
        return Exit(ExitKind.UNRESPONSIVE if self._is_unresponsive else kind, reason)

    def backoff(self) -> float:
        """Schedules the next start; returns the seconds until then.

        The delay doubles with every exit up to a maximum, and is reset once a process has served for as long
        as the maximum.
        """
        now = time.monotonic()
        if self._serving_since is not None and now - self._serving_since >= MAX_BACKOFF_SECONDS:
            self._next_backoff = FIRST_BACKOFF_SECONDS
        delay, self._next_backoff = self._next_backoff, min(2 * self._next_backoff, MAX_BACKOFF_SECONDS)
        self.restart_at = now + delay
        return delay

    def kill(self) -> None:
        """Kills the process."""
        if self._process:
            self._process.kill()

    def wait(self, deadline: float) -> bool:
        """Waits until the process has exited, and kills it at the deadline; returns whether it was killed.

        Args:
            deadline: On the clock `time.monotonic`; may be infinite.
        """
        if not self._process:
            return False
        try:
            self._process.wait(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return True
        return False

    def send(self, message: object) -> None:
        """Sends a message. Does nothing if no process is running. For any thread."""
        with self._lock, suppress(OSError):  # it has exited; the closed pipe reports that too
            if self.connection is not None:
                self.connection.send(message)


def _is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped a child."""
    try:
        return bool(os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT))
    except ChildProcessError:  # it has exited, and its status was read
        return False
