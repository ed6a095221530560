"""What a supervisor and a worker process tell each other, over a pipe that ends when either does."""

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from server.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Supervisor to worker, first: what to serve and with what.

    Attributes:
        worker: Its number, from 0.
        settings: Those of the service, with the port that was chosen and the worker's threads.
        cores: Where its threads run.
        metrics: Folder for the files of its metrics.
    """

    worker: int
    settings: Settings
    cores: frozenset[int]
    metrics: Path


class Word(Enum):
    """One step of a worker on its way to serve."""

    READY = auto()  # worker to supervisor: every model has loaded and passed its self-test
    LISTEN = auto()  # supervisor to worker: all others have, too
    SERVING = auto()  # worker to supervisor: it listens


@dataclass(frozen=True)
class Failure:
    """Worker to supervisor, last: why it cannot serve."""

    reason: str
