"""Servers that keep their address: containers of an image or processes on loopback; and Envoy before them."""

import os
import shutil
import signal
import socket
import subprocess
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from attention_client import AttentionClient
from prometheus_client.parser import text_string_to_metric_families

from scripts import local_server

ENVOY_CONFIGURATION = local_server.ROOT / "deploy/envoy/envoy.yaml"
START_SECONDS = 60.0
STOP_SECONDS = 60.0
COMMAND_SECONDS = 60.0
SCRAPE_SECONDS = 5.0
# Private addresses that no other network of the drill's machine should have.
SUBNET, ADDRESS = "10.199.83.0/24", "10.199.83.{}"
NAME = "attention-drill"
ATTEND = "/attention.v1.AttentionService/Attend"
# Several servers share the cores of one machine.
THREADS = 1


class Server(ABC):
    """One server, whose address stays the same when it is stopped, started and replaced.

    Attributes:
        name: For the report.
        target: HOST:PORT of gRPC.
        metrics: HOST:PORT of the metrics.
    """

    def __init__(self, name: str, target: str, metrics: str) -> None:
        self.name, self.target, self.metrics = name, target, metrics

    @abstractmethod
    def start(self, image: str | None = None) -> None:
        """Starts it, from another image if one is given, and returns at once."""

    @abstractmethod
    def stop(self) -> None:
        """Stops it as an orchestrator does: SIGTERM, and waits until it has ended."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it without notice."""

    @abstractmethod
    def freeze(self) -> None:
        """Stops it from running while its connections stay open."""

    @abstractmethod
    def thaw(self) -> None:
        """Lets it run again."""

    def wait_until_ready(self) -> None:
        """Waits until it has loaded its models.

        Raises:
            DeadlineExceededError: It was not ready in time.
        """
        with AttentionClient(self.target) as client:
            client.wait_until_ready(START_SECONDS)

    def answered(self) -> int:
        """Number of calls of Attend that it has answered since it started.

        Raises:
            OSError: It cannot be reached.
        """
        url = f"http://{self.metrics}/metrics"
        with urllib.request.urlopen(url, timeout=SCRAPE_SECONDS) as response:
            families = text_string_to_metric_families(response.read().decode())
            wanted = {"method": ATTEND, "code": "OK"}
            return sum(
                int(sample.value)
                for family in families
                for sample in family.samples
                if sample.name == "attention_requests_total" and wanted.items() <= sample.labels.items()
            )


class ContainerServer(Server):
    """A container with a fixed address in the drill's network."""

    def __init__(self, number: int, image: str, repository: Path) -> None:
        address = ADDRESS.format(10 + number)
        super().__init__(f"{NAME}-{number}", f"{address}:8001", f"{address}:8002")
        self._address, self._image, self._repository = address, image, repository

    def start(self, image: str | None = None) -> None:
        """Makes a new container."""
        self._image = image or self._image
        self.remove()
        docker(
            "run",
            "--detach",
            f"--name={self.name}",
            f"--network={NAME}",
            f"--ip={self._address}",
            "--read-only",
            "--tmpfs=/tmp",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            "--stop-timeout=40",
            "--env=ATTENTION_INSECURE=true",
            f"--env=ATTENTION_THREADS={THREADS}",
            f"--volume={self._repository.resolve()}:/models:ro",
            self._image,
        )

    def stop(self) -> None:
        """Stops the container."""
        docker("stop", self.name)

    def kill(self) -> None:
        """Kills the container."""
        docker("kill", self.name)

    def freeze(self) -> None:
        """Pauses the container."""
        docker("pause", self.name)

    def thaw(self) -> None:
        """Lets the container run again."""
        docker("unpause", self.name)

    def remove(self) -> None:
        """Removes the container if there is one."""
        subprocess.run(
            [_docker(), "rm", "--force", self.name], capture_output=True, timeout=COMMAND_SECONDS, check=False
        )


class ProcessServer(Server):
    """A process on loopback, with ports that were free when it was made."""

    def __init__(self, number: int, repository: Path, logs: Path) -> None:
        self._ports = _free_ports()
        super().__init__(f"process-{number}", *(f"127.0.0.1:{port}" for port in self._ports))
        self._repository, self._log = repository, logs / f"{number}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, image: str | None = None) -> None:  # noqa: ARG002 - a process has no image
        """Starts a new process."""
        port, metrics_port = self._ports
        options = (f"--port={port}", f"--metrics-port={metrics_port}", f"--threads={THREADS}")
        self._process = local_server.start(self._repository, self._log, *options)

    def stop(self) -> None:
        """Sends SIGTERM."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Sends SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Sends SIGCONT."""
        self._signal(signal.SIGCONT)

    def remove(self) -> None:
        """Ends the process if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        self._process.send_signal(number)
        self._process.wait(STOP_SECONDS)

    def _signal(self, number: int) -> None:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        os.kill(self._process.pid, number)


@contextmanager
def containers(count: int, image: str, repository: Path) -> Iterator[list[Server]]:
    """Containers that are not started, and their network; both are removed when the block ends."""
    docker("network", "create", f"--subnet={SUBNET}", NAME)
    servers = [ContainerServer(number, image, repository) for number in range(1, count + 1)]
    try:
        yield list(servers)
    finally:
        for server in servers:
            server.remove()
        docker("network", "rm", NAME)


@contextmanager
def processes(count: int, repository: Path, logs: Path) -> Iterator[list[Server]]:
    """Processes that are not started; they are ended when the block ends."""
    servers = [ProcessServer(number, repository, logs) for number in range(1, count + 1)]
    try:
        yield list(servers)
    finally:
        for server in servers:
            server.remove()


@contextmanager
def envoy(program: str, targets: Sequence[str], logs: Path) -> Iterator[str]:
    """Runs Envoy on loopback until the block ends.

    Args:
        program: Its path.
        targets: HOST:PORT of each server.
        logs: Folder for its configuration and its log.

    Yields:
        HOST:PORT where it listens.
    """
    port = _free_ports()[0]
    file = logs / "envoy.yaml"
    file.write_text(yaml.safe_dump(envoy_configuration(targets, port)))
    with (logs / "envoy.log").open("wb") as log:
        process = subprocess.Popen(
            [program, "--config-path", str(file), "--concurrency", "1"], stdout=log, stderr=log
        )
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
    document: dict[str, Any] = yaml.safe_load(ENVOY_CONFIGURATION.read_text())
    resources = document["static_resources"]
    _set_address(resources["listeners"][0], f"127.0.0.1:{port}")
    _set_address(document["admin"], "127.0.0.1:0")
    endpoints: list[dict[str, Any]] = [{"endpoint": {"address": {"socket_address": {}}}} for _ in targets]
    for endpoint, target in zip(endpoints, targets, strict=True):
        _set_address(endpoint["endpoint"], target)
    resources["clusters"][0]["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    return document


def _set_address(owner: dict[str, Any], target: str) -> None:
    host, _, port = target.rpartition(":")
    owner["address"]["socket_address"] = {"address": host, "port_value": int(port)}


def docker(*arguments: str) -> str:
    """Runs a command of Docker and returns what it printed.

    Raises:
        RuntimeError: It failed; the message says why.
    """
    done = subprocess.run(
        [_docker(), *arguments], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def has_image(image: str) -> bool:
    """Whether an engine runs here that has this image."""
    try:
        docker("image", "inspect", image)
    except (RuntimeError, OSError, subprocess.TimeoutExpired):
        return False
    return True


def _docker() -> str:
    found = shutil.which("docker")
    if found is None:
        raise FileNotFoundError("docker is not installed")
    return found


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
