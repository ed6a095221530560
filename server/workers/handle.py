"""A worker as the supervisor sees it, across all processes that run as this worker one after another."""

import math
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing import Pipe
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from server.workers.assignment import Assignment, Failure, Heartbeat, Ping, State
from server.workers.peers import Answer, Question
from server.workers.watchdog import Watchdog

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
# How long a process may take to exit after its pipe has closed. Then it is killed.
EXIT_SECONDS = 10.0


class ExitKind(StrEnum):
    """Why a process of a worker ended, as a label of the metrics."""

    NOT_STARTED = "not_started"
    """The system could not start it."""
    EXITED = "exited"
    """It ended by itself."""
    KILLED = "killed"
    """A signal ended it."""
    UNRESPONSIVE = "unresponsive"
    """The supervisor killed it because it did not answer."""


@dataclass(frozen=True)
class Exit:
    """The end of a process: its kind, and the reason for people."""

    kind: ExitKind
    reason: str


class WorkerHandle:
    """Starts, commands, watches and reaps the process of one worker.

    Attributes:
        number: Number of the worker, from 0.
        watchdog: Judges whether its process answers.
        state: State of its process.
        connection: The supervisor's end of the pipe; None while no process is running.
        messages: What the worker asked and answered, for the supervisor to take.
        restart_at: When the next process is to start, on the clock `time.monotonic`; None unless one is due.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.number = assignment.worker
        self.watchdog = Watchdog(assignment.settings.worker_timeout_seconds)
        self.state = State.STOPPED
        # The pipe's type has two parameters in the type stubs and none at run time.
        self.connection: Any = None
        self.messages: list[Question | Answer] = []
        self.restart_at: float | None = None
        self._assignment = assignment
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
        connection, workers_end = Pipe()
        with workers_end:
            descriptor = workers_end.fileno()
            # In its own process group: of the signals that a terminal sends to a group, only the supervisor
            # receives one, and it drains the workers.
            command = [sys.executable, "-m", "server.workers.worker", str(descriptor)]
            self._process = Popen(command, stdin=DEVNULL, pass_fds=[descriptor], process_group=0)  # noqa: S603
        self.connection, self.state = connection, State.LOADING
        # Arguments and environment variables would be visible to other users, and would need encoding.
        self._send(self._assignment)

    def listen(self) -> None:
        """Orders the process to listen."""
        self.state = State.LISTENING
        self._send(State.LISTENING)

    def receive(self) -> bool:
        """Receives one message; returns False if the pipe has closed instead."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, Question | Answer):
            self.messages.append(message)
        elif isinstance(message, Heartbeat):
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
            self._failure = (
                f"worker {self.number} {what} for {self.watchdog.silent_seconds:.1f} s and was killed"
            )
            self._process.kill()
        elif self.watchdog.ping():
            self._send(Ping())
        return self._is_unresponsive

    def reap(self) -> Exit:
        """Waits for the exit of a process whose pipe has closed."""
        status = 0
        if self._process:
            try:
                status = self._process.wait(EXIT_SECONDS)
            except TimeoutExpired:
                self._process.kill()
                status = self._process.wait()
        self.connection.close()
        self.connection, self.state = None, State.STOPPED
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        kind = ExitKind.KILLED if status < 0 else ExitKind.EXITED
        reason = self._failure or f"worker {self.number} {how}"
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

    def drain(self) -> None:
        """Closes the pipe, so that the process drains. One that has not listened yet is killed."""
        if self.connection:
            self._send(State.DRAINING)
            self.connection.close()
        if self._process and self.state in (State.LOADING, State.READY):
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
        """Sends a message. Does nothing if no process is running."""
        if self.connection:
            self._send(message)

    def _send(self, message: object) -> None:
        with suppress(OSError):  # the process has exited; the closed pipe reports that too
            self.connection.send(message)


def _is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped a child."""
    try:
        return bool(os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT))
    except ChildProcessError:  # it has exited, and its status was read
        return False
