"""A worker as the supervisor sees it, across all processes that run as this worker one after another."""

import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from server.workers.assignment import Assignment, Failure, State

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
# How long a process may take to exit after its pipe has closed. Then it is killed.
EXIT_SECONDS = 10.0


class WorkerHandle:
    """Starts, commands and reaps the process of one worker.

    Attributes:
        number: Number of the worker, from 0.
        state: State of its process.
        connection: The supervisor's end of the pipe; None while no process is running.
        restart_at: When the next process is to start, on the clock `time.monotonic`; None unless one is due.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.number = assignment.worker
        self.state = State.STOPPED
        # The pipe's type has two parameters in the type stubs and none at run time.
        self.connection: Any = None
        self.restart_at: float | None = None
        self._assignment = assignment
        self._process: Popen[bytes] | None = None
        self._failure = ""
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
        if isinstance(message, Failure):
            self._failure = message.reason
        else:
            self.state = message
        if message is State.SERVING:
            self._serving_since = time.monotonic()
        return True

    def reap(self) -> str:
        """Waits for the exit of a process whose pipe has closed; returns the reason for its exit."""
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
        return self._failure or f"worker {self.number} {how}"

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
            self.connection.close()
        if self._process and self.state in (State.LOADING, State.READY):
            self._process.kill()

    def wait(self) -> None:
        """Waits until the process has exited."""
        if self._process:
            self._process.wait()

    def _send(self, message: Assignment | State) -> None:
        with suppress(OSError):  # the process has exited; the closed pipe reports that too
            self.connection.send(message)
