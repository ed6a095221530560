"""Other servers that are measured beside the service: which are installed, and how each is started."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import torchserve, triton
from benchmarks.peers.launch import Command, Launch
from benchmarks.processes import ServerAddress, free_ports, running
from benchmarks.results import TORCHSERVE, TRITON, TRITON_CPP, TRITON_CPP_SINGLE
from benchmarks.wire import Api
from benchmarks.workload import AttentionKind, Model

HOME_VARIABLE = "PEERS_HOME"


@dataclass(frozen=True)
class Peer:
    """A server of another project.

    Attributes:
        name: Name in reports.
        requirement: A file below the peers' home that exists if the peer is installed.
        api: The API it is measured with.
        kinds: The attention kinds that it can serve.
        version: The version that `install.sh` installs.
        first_port: Start of the search for free ports; different for each peer, because none is bound yet.
        command: Prepares a folder for the server and returns the command that starts it.
        backends: Returns the folder of backends that the user names, or None; for peers that need one.
    """

    name: str
    requirement: str
    api: Api
    kinds: tuple[AttentionKind, ...]
    version: str
    first_port: int
    command: Callable[[Launch], Command]
    backends: Callable[[], Path | None] | None = None

    def is_installed(self) -> bool:
        """Returns whether the peer can be started."""
        has_backends = self.backends is None or self.backends() is not None
        return has_backends and (home() / self.requirement).exists()

    def runtime(self) -> str:
        """Returns the version of the ONNX Runtime that the peer computes with."""
        if self.backends is not None and (folder := self.backends()) is not None:
            return triton.runtime_version(folder)
        pattern = f"{self.requirement.split('/')[0]}/lib/python*/site-packages/onnxruntime-*.dist-info"
        found = [path.name.removesuffix(".dist-info").split("-")[1] for path in home().glob(pattern)]
        return ", ".join(found) or "unknown"

    @contextmanager
    def serving(self, graph: Path, model: Model, work: Path) -> Iterator[ServerAddress]:
        """Starts the peer for one model. It may not be ready when the block begins.

        Args:
            graph: The ONNX file to serve.
            model: The model in that file.
            work: Folder for logs and the peer's own files.
        """
        port = free_ports(5, start=self.first_port)
        label = f"{self.command.__module__.rpartition('.')[2]}-{self.first_port}-{model.name}"
        folder = work / label
        folder.mkdir(parents=True, exist_ok=True)
        command = self.command(Launch(home(), graph, model, folder, port))
        environment = {**os.environ, "TMPDIR": str(folder), **command.environment}
        with running(command.arguments, work / f"{label}.log", environment, folder) as process:
            yield ServerAddress(f"127.0.0.1:{port}", process.pid)


PEERS = (
    Peer(
        name=TRITON,
        requirement="triton/bin/python",
        api=Api.OPEN_INFERENCE,
        kinds=tuple(AttentionKind),
        version="2.51",
        first_port=20000,
        command=triton.python_backend,
    ),
    Peer(
        name=TRITON_CPP,
        requirement="triton/bin/python",
        backends=triton.backends,
        api=Api.OPEN_INFERENCE,
        kinds=tuple(AttentionKind),
        version="2.51",
        first_port=22000,
        command=triton.onnxruntime_backend,
    ),
    Peer(
        name=TRITON_CPP_SINGLE,
        requirement="triton/bin/python",
        backends=triton.backends,
        api=Api.OPEN_INFERENCE,
        kinds=tuple(AttentionKind),
        version="2.51",
        first_port=23000,
        command=triton.onnxruntime_backend_single_instance,
    ),
    Peer(
        name=TORCHSERVE,
        requirement="torchserve/bin/torchserve",
        api=Api.TORCHSERVE,
        kinds=(AttentionKind.SELF, AttentionKind.CAUSAL),
        version="0.12",
        first_port=21000,
        command=torchserve.handler,
    ),
)


def home() -> Path:
    """Returns the folder that holds the peers' installations: PEERS_HOME or ~/.cache/attention-peers."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".cache/attention-peers").resolve()


def installed() -> list[Peer]:
    """Returns the peers that can be started."""
    return [peer for peer in PEERS if peer.is_installed()]


def absent() -> tuple[str, ...]:
    """Returns the names of the peers that are not installed."""
    return tuple(peer.name for peer in PEERS if not peer.is_installed())


def versions() -> dict[str, str]:
    """Returns the version of each installed peer and of the ONNX Runtime that it uses."""
    return {peer.name: f"{peer.version}, ONNX Runtime {peer.runtime()}" for peer in installed()}
