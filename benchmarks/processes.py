"""Processes of a run: workers that measure, and servers that are measured."""

import multiprocessing
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STOP_SECONDS = 30


@dataclass(frozen=True)
class ServerAddress:
    """Where a server listens, and the process whose time and memory count as its own."""

    address: str
    pid: int


def worker() -> ProcessPoolExecutor:
    """One fresh process that keeps what it has loaded, and sleeps between its jobs."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


@contextmanager
def running(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with a group of its own, its output in a file; it and its children end with the block."""
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 - commands of this package
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Asks the group to end, and ends it where it does not."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(STOP_SECONDS)
    except ProcessLookupError:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_SECONDS)


def free_ports(count: int, *, start: int, step: int = 8) -> int:
    """The first of so many neighbouring ports that nothing listens on."""
    for first in range(start, start + 1000, step):
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise OSError(f"no {count} neighbouring ports from {start} are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
