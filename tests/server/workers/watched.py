"""A service whose log is read as it is written, so that tests wait for events and for its last process."""

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
    """A service that was started."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: TextIO) -> None:
        self.process = process
        self.seen: list[str] = []
        self._log = log

    def until(self, pattern: str) -> re.Match[str]:
        """Reads on to an event, and returns what it says."""
        for line in self._log:
            self.seen.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"{pattern!r} is not in the log:\n{''.join(self.seen)}")

    def rest(self) -> str:
        """All that was said, once no process is left that could say more."""
        self.seen += self._log
        return "".join(self.seen)

    def pids(self, workers: int) -> list[int]:
        """Reads until so many workers have been started."""
        return [int(self.until(r" worker started .*\bpid=(\d+)")[1]) for _ in range(workers)]

    def ports(self) -> tuple[int, int]:
        """Reads until the service serves; its ports for calls and for metrics."""
        found = self.until(r" serving .*\bport=(\d+) metrics_port=(\d+)")
        return int(found[1]), int(found[2])

    def terminate(self) -> None:
        """Asks the service to end."""
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def watched(repository: Path, folder: Path, *options: str) -> Iterator[Watched]:
    """Runs `python -m server`, until the block ends."""
    pipe = folder / "log"
    os.mkfifo(pipe)
    # A reader first: whoever opens the pipe to write waits for one. The pipe ends with its last writer.
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
