"""What is reported of runs, and of requests that end."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.statistics import RunTimes
from attention_serving.server.engine.types import SequenceInputs

log = logging.getLogger(__name__)


class ExpiryStage(StrEnum):
    """Where a request was when its deadline passed."""

    QUEUED = "queued"
    """Before its run began."""
    RUNNING = "running"
    """After its run began."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """The engine at one moment.

    Attributes:
        queued_sequences: Number of sequences that wait for a run.
        oldest_seconds: How long the oldest of them has waited; 0 if there is none.
        predicted_seconds: Expected duration of the runs of all queued sequences.
        in_flight_bytes: Memory that is reserved for requests.
        run_bytes: Memory that is admitted for the runs under way.
        running: Number of runs under way.
    """

    queued_sequences: int = 0
    oldest_seconds: float = 0.0
    predicted_seconds: float = 0.0
    in_flight_bytes: int = 0
    run_bytes: int = 0
    running: int = 0


class BatchReport(NamedTuple):
    """One completed run of a batch.

    Attributes:
        model: Name of the model.
        sequences: Number of sequences in the batch.
        tokens: Query rows and, for cross-attention, key rows of all sequences.
        padding: Rows that were computed in addition to `tokens`.
        queue_seconds: Time in the queue, for each sequence.
        seconds: Duration of the run.
    """

    model: str
    sequences: int
    tokens: int
    padding: int
    queue_seconds: list[float]
    seconds: float


class Observer(Protocol):
    """Receives the engine's reports, on the thread that is concerned."""

    def batch_completed(self, report: BatchReport) -> None:
        """Called after each run that succeeded."""

    def requests_answered(self, model: str, seconds: Sequence[float]) -> None:
        """Called when requests have their results, each so many seconds after it was queued."""

    def request_failed(self, model: str, code: str) -> None:
        """Called after a request to a loaded model was refused or ended without a result, with its code."""

    def request_expired(self, model: str, stage: ExpiryStage) -> None:
        """Called after a request to a loaded model ended because its deadline had passed."""

    def run_terminated(self, model: str) -> None:
        """Called after a run was stopped because no caller waited for its results any more."""


class NullObserver:
    """Ignores all reports."""

    def batch_completed(self, report: BatchReport) -> None:
        """Does nothing."""

    def requests_answered(self, model: str, seconds: Sequence[float]) -> None:
        """Does nothing."""

    def request_failed(self, model: str, code: str) -> None:
        """Does nothing."""

    def request_expired(self, model: str, stage: ExpiryStage) -> None:
        """Does nothing."""

    def run_terminated(self, model: str) -> None:
        """Does nothing."""


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


def report_run(
    observer: Observer, graph: GraphKind, sequences: list[SequenceInputs], started: float, times: RunTimes
) -> None:
    """Reports a run that succeeded.

    Args:
        observer: Receives the report.
        graph: The graph that ran.
        sequences: What ran.
        started: When the inputs began to be padded.
        times: How long its parts took.
    """
    model = sequences[0].request.model
    rows = sum([queued.shape.rows for queued in sequences])
    report = BatchReport(
        model=model.name,
        sequences=len(sequences),
        tokens=rows,
        padding=_computed_rows(sequences) - rows,
        queue_seconds=[started - queued.request.queued_at for queued in sequences],
        seconds=time.monotonic() - started,
    )
    model.statistics.add_run(report.queue_seconds, times)
    observe(lambda: observer.batch_completed(report))
    timelines = [queued.request.timeline for queued in sequences if queued.request.timeline is not None]
    if timelines:
        run = RecordedRun(
            model=model.name,
            version=model.version,
            precision=model.manifest.precision,
            graph=graph,
            sequences=report.sequences,
            rows=report.tokens,
            padding=report.padding,
            started_at=started,
            ended_at=started + report.seconds,
        )
        record_run(run, timelines)


def _computed_rows(sequences: list[SequenceInputs]) -> int:
    """Rows that sequences have when all are padded to the longest."""
    shape = sequences[0].shape
    if all(queued.shape is shape for queued in sequences):  # the usual case
        return len(sequences) * shape.rows
    sizes = [queued.sizes for queued in sequences]
    return len(sequences) * sum([max([size[axis] for size in sizes]) for axis in sizes[0]])


def observe(report: Callable[[], None]) -> None:
    """Calls an observer. Its failure is logged: monitoring must not break what it monitors."""
    try:
        report()
    except Exception:
        log.exception("observer failed")
