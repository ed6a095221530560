"""What is reported of runs, and of requests that end."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.requests.validated_request import SequenceInputs
from attention_serving.server.engine.statistics import RecordedRun, RunTimes, record_run

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
