"""A server process whose log is read as it is written, so that tests can wait for events."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from scripts.local_server import start


class Watched:
    """A started service."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: TextIO) -> None:
        self.process = process
        self.seen: list[str] = []
        self._log = log

    def until(self, pattern: str) -> re.Match[str]:
        """Reads up to the first line that matches, and returns the match."""
        for line in self._log:
            self.seen.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"{pattern!r} is not in the log:\n{''.join(self.seen)}")

    def matches(self, pattern: str, count: int) -> list[re.Match[str]]:
        """Reads until that many lines of the whole log match; returns the matches."""
        while len(found := [match for line in self.seen if (match := re.search(pattern, line))]) < count:
            self.until(pattern)
        return found

    def rest(self) -> str:
        """The whole log, once every process that could write to it has ended."""
        self.seen += self._log
        return "".join(self.seen)

    def pids(self, workers: int) -> list[int]:
        """Reads until that many worker processes have been started; returns their ids.

        The first process of each worker, in the order of their numbers; then those that replaced one.
        """
        found = self.matches(r" worker started worker=(\d+) pid=(\d+)", workers)
        started = [(int(each[1]), int(each[2])) for each in found]
        first = dict(reversed(started))
        return [first[number] for number in sorted(first)] + [
            pid for number, pid in started if pid != first[number]
        ]

    def ports(self, event: str = "serving") -> tuple[int, int]:
        """Reads up to an event that names the ports; returns those for gRPC and for metrics."""
        found = self.until(rf" {event} .*\bport=(\d+) metrics_port=(\d+)")
        return int(found[1]), int(found[2])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends a signal to stop."""
        self.process.send_signal(number)


@contextmanager
def watched(repository: Path, folder: Path, *options: str) -> Iterator[Watched]:
    """Runs `python -m server` until the block ends."""
    pipe = folder / "log"
    os.mkfifo(pipe)
    # The reading end is opened first, because opening the writing end blocks without it. The pipe ends when
    # the last writer closes it.
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    process = start(repository, pipe, *options)
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor) as log:
        service = Watched(process, log)
        try:
            yield service
        finally:
            process.kill()
            process.wait(timeout=60)
            service.rest()
