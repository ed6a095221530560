"""How many requests each model has answered, and where their time went."""

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

# How many runs or results wait at most.
MOST_WAITING = 1024


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

    Runs and results are frequent: they wait in lists until `fold` is called, or many wait.

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
        self._new_runs: deque[tuple[list[float], RunTimes, float]] = deque()
        self._new_results: deque[float] = deque()

    def add_run(self, queue_seconds: list[float], times: RunTimes) -> None:
        """Adds a run.

        Args:
            queue_seconds: Time in the queue, for each sequence.
            times: Duration of the run's parts.
        """
        self._new_runs.append((queue_seconds, times, time.time()))
        if len(self._new_runs) > MOST_WAITING:
            self.fold()

    def add_results(self, seconds: Iterable[float]) -> None:
        """Adds requests that have their results, each by its duration."""
        self._new_results.extend(seconds)
        if len(self._new_results) > MOST_WAITING:
            self.fold()

    def add_failure(self, seconds: float) -> None:
        """Adds a request that has no result."""
        with self.lock:
            self.failed.add(seconds)

    def fold(self) -> None:
        """Brings the attributes up to date."""
        with self.lock:
            while self._new_runs:
                queue_seconds, times, self.last_run = self._new_runs.popleft()
                self.queued.add(sum(queue_seconds), len(queue_seconds))
                self.runs.setdefault(len(queue_seconds), RunDurations()).add(times)
            while self._new_results:
                self.succeeded.add(self._new_results.popleft())
