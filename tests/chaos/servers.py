"""Servers that keep their address: containers of an image or processes on loopback; and Envoy before them."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from attention_client import AttentionClient

from benchmarks.processes import free_ports
from scripts import local_server
from tests.chaos.process import metrics
from tests.deploy.images import HARDENED, INSECURE, docker

ENVOY_CONFIGURATION = local_server.ROOT / "deploy/envoy/envoy.yaml"
START_SECONDS, STOP_SECONDS = 60.0, 60.0
COUNTED = "attention_requests_total{"
# Private addresses that no other network of the drill's machine should have.
SUBNET, ADDRESS = "10.199.83.0/24", "10.199.83.{}"
NAME = "attention-drill"
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

    def start(self, image: str | None = None) -> None:  # noqa: ARG002 - a process has no image
        """Starts it, a container from another image if one is given, and returns at once."""
        port, metrics_port = self._ports
        options = (f"--port={port}", f"--metrics-port={metrics_port}", f"--threads={THREADS}")
        self._process = local_server.start(self._repository, self._log, *options)

    def do(self, verb: str) -> None:
        """Does what Docker's command does: stop, which waits until it has ended; kill, pause or unpause."""
        self._process.send_signal(SIGNALS[verb])
        if verb in ("stop", "kill"):
            self._process.wait(STOP_SECONDS)

    def remove(self) -> None:
        """Ends it if it runs."""
        if self._process.poll() is None:
            self.do("kill")

    def wait_until_ready(self) -> None:
        """Waits until it has loaded its models."""
        with AttentionClient(self.target) as client:
            client.wait_until_ready(START_SECONDS)

    def answered(self) -> int:
        """Number of calls of Attend that it has answered since it started.

        Raises:
            OSError: It cannot be reached.
        """
        found = metrics(self._metrics)
        wanted = 'code="OK",method="/attention.v1.AttentionService/Attend"'
        return sum(int(value) for name, value in found.items() if name.startswith(COUNTED) and wanted in name)


class Container(Server):
    """A container with a fixed address in the drill's network."""

    def __init__(self, number: int, repository: Path, image: str) -> None:
        self._address = ADDRESS.format(10 + number)
        self.target, self._metrics = f"{self._address}:8001", f"{self._address}:8002"
        self._repository, self._name, self._image = repository, f"{NAME}-{number}", image

    def start(self, image: str | None = None) -> None:
        """Makes a new container."""
        self._image = image or self._image
        self.remove()
        named = (f"--name={self._name}", f"--network={NAME}", f"--ip={self._address}", "--stop-timeout=40")
        given = (f"--env=ATTENTION_THREADS={THREADS}", f"--volume={self._repository.resolve()}:/models:ro")
        docker("run", "--detach", *named, *HARDENED, INSECURE, *given, self._image)

    def do(self, verb: str) -> None:
        """Runs Docker's command."""
        docker(verb, self._name)

    def remove(self) -> None:
        """Removes the container if there is one."""
        with suppress(RuntimeError):
            docker("rm", "--force", self._name)


@contextmanager
def three_servers(image: str, repository: Path, logs: Path) -> Iterator[Sequence[Server]]:
    """Ready servers, removed when the block ends: containers if there is an image, else processes."""
    servers = [Server(number, repository, logs) for number in range(3)]
    if image:
        docker("network", "create", f"--subnet={SUBNET}", NAME)
        servers = [Container(number, repository, image) for number in range(3)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.remove()
        if image:
            docker("network", "rm", NAME)


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
