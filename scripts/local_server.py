"""A server process on loopback, for demonstrations and tests."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The tests' server loads more than forty models, on cores that other processes may use too.
START_SECONDS = 300
# What a process runs, from here or from the wheel.
MODULE = "attention_serving.server"


@dataclass(frozen=True)
class ServerProcess:
    """A ready server, and the log that it writes."""

    process: "subprocess.Popen[bytes]"
    log: Path
    port: int
    metrics_port: int

    @property
    def target(self) -> str:
        """host:port of the gRPC server."""
        return f"127.0.0.1:{self.port}"

    @property
    def http_port(self) -> int:
        """Port of the HTTP listener, if it has one."""
        (port,) = re.findall(r" serving .*\bhttp_port=(\d+)", self.log.read_text())
        return int(port)

    def stop(self) -> int:
        """Stops the server as an orchestrator does, and returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@contextmanager
def serving(
    repository: Path, log: Path, *options: str, root: Path = ROOT, python: Path = Path(sys.executable)
) -> Iterator[ServerProcess]:
    """Runs the server of a checkout on ports that the system chooses, until the block ends."""
    process = start(repository, log, *options, root=root, python=python)
    try:
        ports = _wait_for_ports(process, log)
        yield ServerProcess(process, log, *ports)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=60)


def start(
    repository: Path, log: Path, *options: str, root: Path = ROOT, python: Path = Path(sys.executable)
) -> "subprocess.Popen[bytes]":
    """Starts a server and returns at once; the log goes to a file."""
    command = [str(python), "-m", MODULE, "--model-repository", str(repository.resolve())]
    with log.open("wb") as file:
        return subprocess.Popen(  # noqa: S603 - the server of a checkout
            [*command, "--port=0", "--metrics-port=0", *options],
            cwd=root,
            stderr=file,
            env={key: value for key, value in os.environ.items() if not key.startswith("ATTENTION_")},
        )


def _wait_for_ports(process: "subprocess.Popen[bytes]", log: Path) -> tuple[int, int]:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        text = log.read_text()
        if ports := re.search(r" serving .*\bport=(\d+) metrics_port=(\d+)", text):
            return int(ports[1]), int(ports[2])
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}:\n{text}")
        time.sleep(0.05)
    raise TimeoutError(f"the server was not ready within {START_SECONDS} s:\n{log.read_text()}")
