"""Servers on loopback that keep their addresses; and Envoy before them."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from attention_client import AttentionClient

from benchmarks.processes import free_ports
from scripts import local_server
from tests.support.prometheus import calls_ended

ENVOY_CONFIGURATION = local_server.ROOT / "deploy/envoy/envoy.yaml"
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


@contextmanager
def envoy(program: str, targets: Sequence[str], logs: Path) -> Iterator[str]:
    """Runs Envoy on loopback before some servers until the block ends; yields HOST:PORT where it listens."""
    (port,) = free_ports()
    file, target = logs / "envoy.yaml", f"127.0.0.1:{port}"
    file.write_text(yaml.safe_dump(envoy_configuration(targets, target)))
    command = [program, "--config-path", str(file), "--concurrency", "1"]
    with (logs / "envoy.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with AttentionClient(target) as client:
            client.wait_until_ready(START_SECONDS)
        yield target
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def envoy_configuration(targets: Sequence[str], listens: str) -> dict[str, Any]:
    """The configuration with other servers, and with another address."""

    def address(target: str) -> dict[str, Any]:
        host, _, port = target.rpartition(":")
        return {"address": {"socket_address": {"address": host, "port_value": int(port)}}}

    document: dict[str, Any] = yaml.safe_load(ENVOY_CONFIGURATION.read_text())
    resources = document["static_resources"]
    resources["listeners"][0] |= address(listens)
    document["admin"] |= address("127.0.0.1:0")
    endpoints = [{"endpoint": address(target)} for target in targets]
    resources["clusters"][0]["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    return document
