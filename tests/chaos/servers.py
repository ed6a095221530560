"""Servers on loopback that keep their addresses; and Envoy before them."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
SIGNALS = {
    "stop": signal.SIGTERM,
    "kill": signal.SIGKILL,
    "pause": signal.SIGSTOP,
    "unpause": signal.SIGCONT,
}


class Server:
    """A process on loopback, whose address stays the same when it is stopped, started and replaced.

    Attributes:
        target: HOST:PORT of gRPC.
    """

    def __init__(self, number: int, repository: Path, logs: Path) -> None:
        self._repository, self._log, self._ports = repository, logs / f"{number}.log", free_ports(2)
        self.target, self._metrics = (f"127.0.0.1:{port}" for port in self._ports)

    def start(self) -> None:
        """Starts it, and returns at once."""
        port, metrics_port = self._ports
        options = (f"--port={port}", f"--metrics-port={metrics_port}", f"--threads={THREADS}")
        self._process = local_server.start(self._repository, self._log, *options)

    def do(self, verb: str) -> None:
        """Sends it a signal: stop, which waits until it has ended; kill, pause or unpause."""
        self._process.send_signal(SIGNALS[verb])
        if verb in ("stop", "kill"):
            self._process.wait(STOP_SECONDS)

    def wait_until_ready(self) -> None:
        """Waits until it has loaded its models."""
        with AttentionClient(self.target) as client:
            client.wait_until_ready(START_SECONDS)

    def answered(self) -> float:
        """Number of calls of Attend that it has answered since it started.

        Raises:
            OSError: It cannot be reached.
        """
        return calls_ended(self._metrics, code="OK", method="/attention.v1.AttentionService/Attend")


@contextmanager
def three_servers(repository: Path, logs: Path) -> Iterator[Sequence[Server]]:
    """Ready servers, which end with the block."""
    servers = [Server(number, repository, logs) for number in range(3)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.do("kill")


@contextmanager
def envoy(program: str, targets: Sequence[str], logs: Path) -> Iterator[str]:
    """Runs Envoy on loopback before some servers until the block ends; yields HOST:PORT where it listens."""
    (port,) = free_ports()
    file = logs / "envoy.yaml"
    file.write_text(yaml.safe_dump(envoy_configuration(targets, port)))
    command = [program, "--config-path", str(file), "--concurrency", "1"]
    with (logs / "envoy.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        target = f"127.0.0.1:{port}"
        with AttentionClient(target) as client:
            client.wait_until_ready(START_SECONDS)
        yield target
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def envoy_configuration(targets: Sequence[str], port: int) -> dict[str, Any]:
    """The configuration with other servers, and on another port of loopback."""

    def address(target: str) -> dict[str, Any]:
        host, _, port = target.rpartition(":")
        return {"address": {"socket_address": {"address": host, "port_value": int(port)}}}

    document: dict[str, Any] = yaml.safe_load(ENVOY_CONFIGURATION.read_text())
    resources = document["static_resources"]
    resources["listeners"][0] |= address(f"127.0.0.1:{port}")
    document["admin"] |= address("127.0.0.1:0")
    endpoints = [{"endpoint": address(target)} for target in targets]
    resources["clusters"][0]["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    return document
