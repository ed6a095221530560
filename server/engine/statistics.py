"""How many requests each model has answered, and where their time went."""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class Durations:
    """How often something happened, and how long it took in total.

    Attributes:
        count: How often.
        seconds: Total duration.
    """

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Adds a duration, or several by their sum."""
        self.count += count
        self.seconds += seconds


class RunTimes(NamedTuple):
    """How long the parts of a run took, in seconds.

    Attributes:
        prepare: Padding and stacking the inputs.
        compute: The run itself.
        split: Taking the outputs apart.
    """

    prepare: float
    compute: float
    split: float


@dataclass(slots=True)
class RunDurations:
    """The parts of runs of one number of sequences."""

    prepare: Durations = field(default_factory=Durations)
    compute: Durations = field(default_factory=Durations)
    split: Durations = field(default_factory=Durations)

    def add(self, times: RunTimes) -> None:
        """Adds a run."""
        self.prepare.add(times.prepare)
        self.compute.add(times.compute)
        self.split.add(times.split)


@dataclass
class ModelStatistics:
    """What a loaded model has done since it was loaded. Any thread may call its methods.

    Attributes:
        succeeded: Requests, from their arrival in the queue to their results.
        failed: Requests that were queued and have no result: refused by a run, expired or cancelled.
        queued: Sequences, from their arrival in the queue to their runs.
        runs: Parts of runs by their number of sequences.
        last_run: When the last run ended, in seconds since 1970; 0 before the first.
    """

    succeeded: Durations = field(default_factory=Durations)
    failed: Durations = field(default_factory=Durations)
    queued: Durations = field(default_factory=Durations)
    runs: dict[int, RunDurations] = field(default_factory=dict)
    last_run: float = 0.0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def add_run(self, queue_seconds: list[float], times: RunTimes) -> None:
        """Adds a run.

        Args:
            queue_seconds: Time in the queue, for each sequence.
            times: Duration of the run's parts.
        """
        with self.lock:
            self.queued.add(sum(queue_seconds), len(queue_seconds))
            self.runs.setdefault(len(queue_seconds), RunDurations()).add(times)
            self.last_run = time.time()

    def add_results(self, seconds: Iterable[float]) -> None:
        """Adds requests that have their results, each by its duration."""
        with self.lock:
            for duration in seconds:
                self.succeeded.add(duration)

    def add_failure(self, seconds: float) -> None:
        """Adds a request that has no result."""
        with self.lock:
            self.failed.add(seconds)
