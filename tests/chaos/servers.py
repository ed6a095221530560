"""Servers that keep their address: containers of an image or processes on loopback; and Envoy before them."""

import signal
import socket
import subprocess
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from attention_client import AttentionClient
from prometheus_client.parser import text_string_to_metric_families

from scripts import local_server
from tests.deploy.images import HARDENED, INSECURE, docker

ENVOY_CONFIGURATION = local_server.ROOT / "deploy/envoy/envoy.yaml"
START_SECONDS, STOP_SECONDS, SCRAPE_SECONDS = 60.0, 60.0, 5.0
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


class Server(ABC):
    """One server, whose address stays the same when it is stopped, started and replaced.

    Attributes:
        target: HOST:PORT of gRPC.
    """

    def __init__(self, repository: Path, target: str, metrics: str) -> None:
        self.target, self._metrics, self._repository = target, metrics, repository

    @abstractmethod
    def start(self, image: str | None = None) -> None:
        """Starts it, from another image if one is given, and returns at once."""

    @abstractmethod
    def do(self, verb: str) -> None:
        """Does what Docker's command does: stop, which waits until it has ended; kill, pause or unpause."""

    @abstractmethod
    def remove(self) -> None:
        """Ends it if it runs."""

    def wait_until_ready(self) -> None:
        """Waits until it has loaded its models."""
        with AttentionClient(self.target) as client:
            client.wait_until_ready(START_SECONDS)

    def answered(self) -> int:
        """Number of calls of Attend that it has answered since it started.

        Raises:
            OSError: It cannot be reached.
        """
        url = f"http://{self._metrics}/metrics"
        with urllib.request.urlopen(url, timeout=SCRAPE_SECONDS) as response:
            families = text_string_to_metric_families(response.read().decode())
        wanted = {"method": "/attention.v1.AttentionService/Attend", "code": "OK"}
        samples = [sample for family in families for sample in family.samples]
        counted = [each for each in samples if each.name == "attention_requests_total"]
        return sum(int(each.value) for each in counted if wanted.items() <= each.labels.items())


class ContainerServer(Server):
    """A container with a fixed address in the drill's network."""

    def __init__(self, number: int, image: str, repository: Path) -> None:
        self._address = ADDRESS.format(10 + number)
        super().__init__(repository, f"{self._address}:8001", f"{self._address}:8002")
        self._name, self._image = f"{NAME}-{number}", image

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


class ProcessServer(Server):
    """A process on loopback, with ports that were free when it was made."""

    def __init__(self, number: int, repository: Path, logs: Path) -> None:
        self._ports = _free_ports()
        super().__init__(repository, *(f"127.0.0.1:{port}" for port in self._ports))
        self._log = logs / f"{number}.log"

    def start(self, image: str | None = None) -> None:  # noqa: ARG002 - a process has no image
        """Starts a new process."""
        port, metrics_port = self._ports
        options = (f"--port={port}", f"--metrics-port={metrics_port}", f"--threads={THREADS}")
        self._process = local_server.start(self._repository, self._log, *options)

    def do(self, verb: str) -> None:
        """Sends the signal that Docker would send."""
        self._process.send_signal(SIGNALS[verb])
        if verb in ("stop", "kill"):
            self._process.wait(STOP_SECONDS)

    def remove(self) -> None:
        """Ends the process if it runs."""
        if self._process.poll() is None:
            self.do("kill")


@contextmanager
def three_servers(image: str, repository: Path, logs: Path) -> Iterator[Sequence[Server]]:
    """Ready servers, removed when the block ends: containers if there is an image, else processes."""
    servers: Sequence[Server]
    if image:
        docker("network", "create", f"--subnet={SUBNET}", NAME)
        servers = [ContainerServer(number, image, repository) for number in range(3)]
    else:
        servers = [ProcessServer(number, repository, logs) for number in range(3)]
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
    port = _free_ports()[0]
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


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
