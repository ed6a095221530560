"""The peers: which are installed, and how each is run for one model."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import cores
from benchmarks.processes import ServerAddress, free_ports, running
from benchmarks.results import TORCHSERVE, TRITON
from benchmarks.wire import Api
from benchmarks.workload import Kind, Model

DEFAULT_FOLDER = Path("../shared/peers")
FOLDER_VARIABLE = "ATTENTION_PEERS"
HOME_VARIABLE = "PEERS_HOME"


@dataclass(frozen=True)
class Peer:
    """One system of others, run by a script of the peers' folder with the script's own settings.

    Attributes:
        name: How reports call it.
        script: File in the peers' folder.
        executable: What its installation leaves, below the peers' home.
        api: How it is asked.
        kinds: Models that its handler takes.
        version: What the script installs.
        ports: Where to look for free ones; apart from other peers', which are not bound yet.
    """

    name: str
    script: str
    executable: str
    api: Api
    kinds: tuple[Kind, ...]
    version: str
    ports: int

    def command(self, folder: Path, graph: Path, model: Model) -> tuple[list[str | Path], int]:
        """The command line, and the gRPC port it will listen on."""
        first = free_ports(5, start=self.ports)
        command: list[str | Path] = [sys.executable, folder / self.script, graph, "--name", model.name]
        command += ["--threads", str(cores())]
        if self.api is Api.TORCHSERVE:
            command += ["--width", str(model.width), "--grpc-port", str(first), "--rest-port", str(first + 2)]
            return command, first
        return [*command, "--grpc-port", str(first)], first

    @contextmanager
    def serving(self, folder: Path, graph: Path, model: Model, work: Path) -> Iterator[ServerAddress]:
        """Starts it for one model; whether it is ready yet must be asked."""
        command, port = self.command(folder, graph, model)
        log = work / f"{self.script}.{model.name}.log"
        with running(command, log, {"TMPDIR": str(work)}) as process:
            yield ServerAddress(f"127.0.0.1:{port}", process.pid)


PEERS = (
    Peer(TRITON, "triton.py", "triton/bin/python", Api.OPEN_INFERENCE, tuple(Kind), "2.51", 20000),
    Peer(
        TORCHSERVE,
        "torchserve.py",
        "torchserve/bin/torchserve",
        Api.TORCHSERVE,
        (Kind.SELF, Kind.CAUSAL),
        "0.12",
        21000,
    ),
)


def home() -> Path:
    """Where the peers are installed."""
    return Path(os.environ.get(HOME_VARIABLE, Path.home() / ".cache/attention-peers"))


def installed(folder: Path) -> list[Peer]:
    """The peers that can be run."""
    return [peer for peer in PEERS if (folder / peer.script).exists() and (home() / peer.executable).exists()]


def absent(folder: Path) -> tuple[str, ...]:
    """Names of the others."""
    there = installed(folder)
    return tuple(peer.name for peer in PEERS if peer not in there)


def versions(folder: Path) -> dict[str, str]:
    """What each installed peer is, with the ONNX Runtime inside."""
    found = {}
    for peer in installed(folder):
        pattern = f"{peer.executable.split('/')[0]}/lib/python*/site-packages/onnxruntime-*.dist-info"
        runtimes = [path.name.removesuffix(".dist-info").split("-")[1] for path in home().glob(pattern)]
        found[peer.name] = f"{peer.version}, ONNX Runtime {', '.join(runtimes) or 'unknown'}"
    return found
