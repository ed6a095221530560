"""Runs batches, and resolves the requests that are complete."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from contextlib import suppress

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.batch import Batch, PendingRequest, QueuedSequence
from attention_serving.server.engine.errors import EngineError, OverloadedError, RunFailedError
from attention_serving.server.engine.execute import Outputs, run_batch
from attention_serving.server.engine.observer import BatchReport, Observer
from attention_serving.server.engine.session import RunControl
from attention_serving.server.engine.statistics import RunTimes
from attention_serving.server.engine.timeline import RecordedRun, record_run
from attention_serving.server.engine.validation import ValidatedRequest

log = logging.getLogger(__name__)
RUN_FAILED = "the runtime failed on this request; see the server's log"
OUT_OF_MEMORY = "the run needs more memory than the server has left for runs; try again later"
# Requests that failed, each with its error.
Failures = list[tuple[ValidatedRequest, EngineError]]
# Stores the outputs of a run, and returns the requests that are complete.
Deliver = Callable[[list[QueuedSequence], list[Outputs]], list[PendingRequest]]


class Runner:
    """Has no thread of its own; several threads may use it at once."""

    def __init__(self, observer: Observer, deliver: Deliver) -> None:
        """Creates a runner.

        Args:
            observer: Receives a report of each run.
            deliver: Called with the outputs of each run.
        """
        self._observer = observer
        self._deliver = deliver

    def run(self, batch: Batch, control: RunControl | None) -> None:
        """Runs a batch. Each of its requests that is complete then has its result or its error.

        Args:
            batch: The batch.
            control: Ends the run early, once all requests have ended.
        """
        try:
            self._run(batch.graph, batch.sequences, control, parallel=batch.is_parallel)
        except Exception:
            log.exception("batch failed", extra={"model": batch.model.name})
            fail([(queued.request, RunFailedError(RUN_FAILED)) for queued in batch])

    def _run(
        self,
        graph: GraphKind,
        sequences: list[QueuedSequence],
        control: RunControl | None,
        *,
        parallel: bool = False,
    ) -> None:
        """Runs sequences together; if that fails, one by one, so that only the request at fault fails."""
        started = time.monotonic()
        try:
            inputs = [queued.inputs for queued in sequences]
            model = sequences[0].request.model
            result = run_batch(model, graph, inputs, control, parallel=parallel)
        except Exception as error:
            self._failed(sequences, control, error)
            return
        self._report(graph, sequences, started, result.times)
        complete = self._deliver(sequences, result.outputs)
        ended = time.monotonic()
        if complete:
            seconds = [ended - pending.queued_at for pending in complete]
            model.statistics.add_results(seconds)
            observe(lambda: self._observer.requests_answered(model.name, seconds))
        for pending in complete:
            pending.resolve()

    def _failed(self, sequences: list[QueuedSequence], control: RunControl | None, error: Exception) -> None:
        model = sequences[0].request.model
        if all(queued.request.future.done() for queued in sequences):
            log.debug("run ended early", extra={"model": model.name})
            observe(lambda: self._observer.run_terminated(model.name))
            return
        log.error("run failed", extra={"model": model.name, "sequences": len(sequences)}, exc_info=error)
        if len(sequences) == 1:
            fail([(sequences[0].request, _run_error(error))])
            return
        for queued in sequences:
            if not queued.request.future.done():
                self._run(queued.graph, [queued], control)

    def _report(
        self, graph: GraphKind, sequences: list[QueuedSequence], started: float, times: RunTimes
    ) -> None:
        rows = sum([queued.inputs.shape.rows for queued in sequences])
        report = BatchReport(
            model=sequences[0].request.model.name,
            sequences=len(sequences),
            tokens=rows,
            padding=_computed_rows(sequences) - rows,
            queue_seconds=[started - queued.pending.queued_at for queued in sequences],
            seconds=time.monotonic() - started,
        )
        sequences[0].request.model.statistics.add_run(report.queue_seconds, times)
        observe(lambda: self._observer.batch_completed(report))
        timelines = [queued.request.timeline for queued in sequences if queued.request.timeline is not None]
        if timelines:
            model = sequences[0].request.model
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


def _computed_rows(sequences: list[QueuedSequence]) -> int:
    """Rows that sequences have when all are padded to the longest."""
    if len(sequences) == 1:
        return sequences[0].inputs.shape.rows
    sizes = [queued.inputs.sizes for queued in sequences]
    return len(sequences) * sum([max([size[axis] for size in sizes]) for axis in sizes[0]])


def observe(report: Callable[[], None]) -> None:
    """Calls an observer. Its failure is logged: monitoring must not break what it monitors."""
    try:
        report()
    except Exception:
        log.exception("observer failed")


def fail(failures: Failures) -> None:
    """Ends requests with their errors. One that has ended before stays as it is."""
    for request, error in failures:
        with suppress(InvalidStateError):  # already cancelled, or another of its sequences failed first
            request.future.set_exception(error)


def _run_error(error: Exception) -> EngineError:
    return OverloadedError(OUT_OF_MEMORY) if isinstance(error, MemoryError) else RunFailedError(RUN_FAILED)
