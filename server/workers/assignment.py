"""What the supervisor tells a worker process first."""

from dataclasses import dataclass
from pathlib import Path

from attention_serving.server.http.options import needs_private_sockets
from attention_serving.server.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Supervisor to worker, first: what to serve, and with which resources.

    Attributes:
        worker: Number of the worker, from 0.
        settings: Settings of the service, with the bound port and the number of threads of this worker.
        cores: CPU cores that its threads may use.
        metrics: Folder for the files of its metrics.
    """

    worker: int
    settings: Settings
    cores: frozenset[int]
    metrics: Path

    @property
    def private_socket(self) -> Path | None:
        """Where it listens for the HTTP process alone, if that needs it."""
        return private_socket(self.metrics, self.worker) if needs_private_sockets(self.settings) else None


def private_socket(folder: Path, worker: int) -> Path:
    """The socket of a worker in the service's temporary folder."""
    return folder / f"grpc-{worker}"
