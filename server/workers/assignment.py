"""Messages between the supervisor and a worker process, over a pipe that closes when either process ends."""

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from server.http.options import needs_private_sockets
from server.settings import Settings


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


class State(Enum):
    """State of a worker. A message that carries a state announces it, or orders the worker into it."""

    STOPPED = auto()  # no process is running; never sent
    LOADING = auto()  # the process loads its models; never sent
    READY = auto()  # worker to supervisor: every model has been loaded and tested
    LISTENING = auto()  # supervisor to worker: start to listen
    SERVING = auto()  # worker to supervisor: it accepts calls
    DRAINING = auto()  # supervisor to worker, before it closes the pipe: finish the calls in progress and end


@dataclass(frozen=True)
class Ping:
    """Supervisor to worker: answer with a heartbeat, and publish the load. One is unanswered at a time."""


@dataclass(frozen=True)
class Heartbeat:
    """Worker to supervisor: the answer to a ping.

    Attributes:
        responsive: Whether the thread that takes calls makes progress, if the worker serves.
    """

    responsive: bool


@dataclass(frozen=True)
class Failure:
    """Worker to supervisor, last: why the worker cannot serve."""

    reason: str
