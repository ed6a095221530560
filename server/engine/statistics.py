"""What each model has answered, and where the time went; and when a request passed its stages.

Nothing is recorded of a request without a timeline: it costs the test of one attribute. All moments are on
`time.monotonic`'s clock. A timeline holds names and numbers only, so that it keeps neither a model nor
tensors in memory.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

# How many events wait at most.
MOST_WAITING = 1024
T = TypeVar("T")


class Waiting(Generic[T]):
    """Events that wait to be counted together. Any thread may call its methods; each is counted once."""

    def __init__(self, count: Callable[[list[T]], None]) -> None:
        """Begins without events.

        Args:
            count: Counts some events, at least one.
        """
        self._count = count
        self._counting = threading.Lock()
        self._events: deque[T] = deque()

    def add(self, *events: T) -> None:
        """Adds events, which are counted once many wait."""
        self._events.extend(events)
        if len(self._events) > MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Counts the events so far."""
        with self._counting:
            if events := [self._events.popleft() for _ in range(len(self._events))]:
                self._count(events)


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
        self._new_runs = Waiting(self._count_runs)
        self._new_results = Waiting(self._count_results)

    def add_run(self, queue_seconds: list[float], times: RunTimes) -> None:
        """Adds a run.

        Args:
            queue_seconds: Time in the queue, for each sequence.
            times: Duration of the run's parts.
        """
        self._new_runs.add((queue_seconds, times, time.time()))

    def add_results(self, seconds: Iterable[float]) -> None:
        """Adds requests that have their results, each by its duration."""
        self._new_results.add(*seconds)

    def add_failure(self, seconds: float) -> None:
        """Adds a request that has no result."""
        with self.lock:
            self.failed.add(seconds)

    def fold(self) -> None:
        """Brings the attributes up to date."""
        self._new_runs.flush()
        self._new_results.flush()

    def _count_runs(self, runs: list[tuple[list[float], RunTimes, float]]) -> None:
        with self.lock:
            for queue_seconds, times, self.last_run in runs:
                self.queued.add(sum(queue_seconds), len(queue_seconds))
                self.runs.setdefault(len(queue_seconds), RunDurations()).add(times)

    def _count_results(self, seconds: list[float]) -> None:
        with self.lock:
            self.succeeded.add(sum(seconds), len(seconds))


# Identifies a request among the records of its owner, such as the span of a trace.
Reference = tuple[bytes, bytes]


@dataclass(eq=False, kw_only=True, slots=True)
class RecordedRun:
    """One run, which its requests share.

    Attributes:
        model: Name of the model.
        version: Version of the model.
        precision: Precision of its weights, such as fp32.
        graph: The graph that ran.
        sequences: Number of sequences in the run.
        rows: Query rows and, for cross-attention, key rows of all sequences.
        padding: Rows that were computed in addition.
        started_at: When the inputs began to be padded.
        ended_at: When the outputs were split.
        requests: Those that have a reference.
        reference: What its first reader identifies it by; None until then.
    """

    model: str
    version: str
    precision: str
    graph: str
    sequences: int
    rows: int
    padding: int
    started_at: float
    ended_at: float
    requests: list[Reference] = field(default_factory=list)
    reference: Reference | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several of its requests have a reference."""
        return len(self.requests) > 1


class Timeline:
    """The stages of one request. Filled by one thread at a time, and read once the request has ended.

    Attributes:
        model: Name of the model; empty until it is found.
        version: Version of the model.
        sequences: Number of sequences; 0 until the request is validated.
        rows: Query rows and, for cross-attention, key rows of all sequences.
        queued_at: When the request was handed to the scheduler; 0 if it was refused before.
        runs: The runs that computed its sequences.
        reference: What the runs refer to the request by; None if they do not.
    """

    # Of the class, so that a timeline is made quickly.
    model = version = ""
    sequences = rows = 0
    queued_at = 0.0
    runs: tuple[RecordedRun, ...] = ()
    reference: Reference | None = None

    @property
    def run_started_at(self) -> float:
        """When its first run began; 0 without a run."""
        if len(self.runs) == 1:  # of most requests
            return self.runs[0].started_at
        return min([run.started_at for run in self.runs], default=0.0)

    @property
    def run_ended_at(self) -> float:
        """When its last run ended; 0 without a run."""
        return max([run.ended_at for run in self.runs], default=0.0)


def record_run(run: RecordedRun, timelines: Iterable[Timeline]) -> None:
    """Adds a run to the requests that it computed, each of which may be given once for each sequence."""
    for timeline in dict.fromkeys(timelines):
        timeline.runs += (run,)
        if timeline.reference is not None:
            run.requests.append(timeline.reference)
