"""One worker as its supervisor sees it, through all the processes that fill its place one after another."""

import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from server.workers.assignment import Assignment, Failure, Word

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
# A process whose pipe has ended is at its end; one that hangs there is helped.
END_SECONDS = 10.0


class Member:
    """A place among the workers.

    Attributes:
        word: The last step of its process on the way to serve; None before the first.
        link: The supervisor's end of the pipe; None while there is no process.
        due: When the next process is to start, on the monotonic clock; None while there is one.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.number = assignment.worker
        self.word: Word | None = None
        self.link: Any = None
        self.due: float | None = None
        self._assignment = assignment
        self._process: Popen[bytes] | None = None
        self._failure = ""
        self._delay = FIRST_DELAY_SECONDS
        self._serving_since: float | None = None

    @property
    def pid(self) -> int | None:
        """Of its process."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts a process.

        Raises:
            OSError: The system refuses one.
        """
        self.word, self.due, self._failure, self._serving_since = None, None, "", None
        link, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            # A group of its own: what a terminal sends to all, the supervisor hands on once.
            command = [sys.executable, "-m", "server.workers.worker", str(descriptor)]
            self._process = Popen(command, stdin=DEVNULL, pass_fds=[descriptor], process_group=0)  # noqa: S603
        self.link = link
        # Over the pipe and not in words or variables of the process: values stay what they are, unseen.
        self._tell(self._assignment)

    def listen(self) -> None:
        """Lets the process listen."""
        self.word = Word.LISTEN
        self._tell(Word.LISTEN)

    def hear(self) -> bool:
        """Takes one message; says whether there was one before the end of the pipe."""
        try:
            message = self.link.recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, Failure):
            self._failure = message.reason
        else:
            self.word = message
        if message is Word.SERVING:
            self._serving_since = time.monotonic()
        return True

    def bury(self) -> str:
        """Waits for the end of a process whose pipe has ended, and returns why it ended."""
        status = 0
        if self._process:
            try:
                status = self._process.wait(END_SECONDS)
            except TimeoutExpired:
                self._process.kill()
                status = self._process.wait()
        self.link.close()
        self.link, self.word = None, None
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return self._failure or f"worker {self.number} {how}"

    def postpone(self) -> float:
        """Sets when the next process is to start; returns the seconds until then.

        They double from time to time while processes keep dying, until one has served for as long as the
        longest wait.
        """
        now = time.monotonic()
        if self._serving_since is not None and now - self._serving_since >= LONGEST_DELAY_SECONDS:
            self._delay = FIRST_DELAY_SECONDS
        delay, self._delay = self._delay, min(2 * self._delay, LONGEST_DELAY_SECONDS)
        self.due = now + delay
        return delay

    def drain(self) -> None:
        """Ends the pipe, so that the process drains; one that has accepted nothing is ended at once."""
        if self.link:
            self.link.close()
        if self._process and self.word in (None, Word.READY):
            self._process.kill()

    def wait(self) -> None:
        """Returns when there is no process."""
        if self._process:
            self._process.wait()

    def _tell(self, message: Assignment | Word) -> None:
        with suppress(OSError):  # it has died, which the pipe's end will say
            self.link.send(message)
