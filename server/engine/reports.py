"""What is reported of runs, and of requests that end."""

import logging
import time
from collections.abc import Callable

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.observer import BatchReport, Observer
from attention_serving.server.engine.statistics import RunTimes
from attention_serving.server.engine.timeline import RecordedRun, record_run
from attention_serving.server.engine.types import SequenceInputs

log = logging.getLogger(__name__)


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
