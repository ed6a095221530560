"""Servers on loopback that keep their addresses."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from attention_client import AttentionClient

from benchmarks.processes import free_ports
from scripts import local_server
from tests.support.prometheus import calls_ended

START_SECONDS, STOP_SECONDS = 60.0, 60.0
# Several servers share the cores of one machine.
THREADS = 1


class Server:
    """A server on loopback, whose address stays the same when it is ended and started.

    Attributes:
        target: HOST:PORT of gRPC.
        process: The process that was started last.
    """

    def __init__(self, repository: Path, log: Path) -> None:
        port, self._metrics_port = free_ports(2)
        self.target = f"127.0.0.1:{port}"
        options = (f"--port={port}", f"--metrics-port={self._metrics_port}", f"--threads={THREADS}")
        self._start = partial(local_server.start, repository, log, *options)
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it has loaded its models."""
        self.process = self._start()
        with AttentionClient(self.target) as client:
            client.wait_until_ready(START_SECONDS)

    def end(self, number: signal.Signals) -> None:
        """Sends a signal that ends it, and waits until it has ended."""
        self.process.send_signal(number)
        self.process.wait(STOP_SECONDS)

    def answered(self) -> float:
        """Number of calls of Attend that it has answered since it started."""
        return calls_ended(self._metrics_port, code="OK", method="/attention.v1.AttentionService/Attend")


@contextmanager
def three_servers(repository: Path, logs: Path) -> Iterator[Sequence[Server]]:
    """Ready servers, which end with the block."""
    servers: list[Server] = []
    try:
        servers.extend(Server(repository, logs / f"{number}.log") for number in range(3))
        yield servers
    finally:
        for server in servers:
            server.end(signal.SIGKILL)
