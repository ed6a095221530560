"""Runs queued requests, a few batches at once, on threads of its own or inline on a caller's thread.

No lock is held when a future resolves, so that its callbacks may submit and cancel requests.
"""

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from artifact.manifest import GraphKind
from server.engine.arena import ArenaTrimmer
from server.engine.batch import Batch, PendingRequest, QueuedSequence
from server.engine.batch_queue import BatchQueue
from server.engine.errors import DeadlineExceededError, EngineError, RunFailedError, ShuttingDownError
from server.engine.execute import Outputs, run_batch
from server.engine.limits import Limits
from server.engine.observer import BatchReport, Observer
from server.engine.types import Result
from server.engine.validation import ValidatedRequest

log = logging.getLogger(__name__)
# While one batch is split and resolved, which takes one core, another computes.
PARALLEL_RUNS = 2
# How much longer an inline run may take if nothing else runs or is queued.
IDLE_FACTOR = 10
RUN_FAILED = "the runtime failed on this request; see the server's log"
EXPIRED = "the deadline passed while the request was queued"
# Requests that failed, each with its error.
Failures = list[tuple[ValidatedRequest, EngineError]]


class Scheduler:
    """Runs submitted requests until it is closed."""

    def __init__(self, limits: Limits, observer: Observer, *, parallel_runs: int = PARALLEL_RUNS) -> None:
        self._observer = observer
        self._queue = BatchQueue(limits)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # How many more runs may start; a batch that was handed to the threads counts as started.
        self._free_slots = self._parallel_runs = parallel_runs
        self._handed_over: deque[Batch] = deque()
        self._trimmer = ArenaTrimmer()
        # Whether the threads empty the queue; otherwise a caller of run_inline does.
        self._threads_needed = False
        self._closing = False
        self._threads = [
            threading.Thread(target=self._loop, name="scheduler", daemon=True) for _ in range(parallel_runs)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: ValidatedRequest, *, wake: bool = True) -> Future[Result]:
        """Queues a request; its future resolves with the result or an `EngineError`.

        Args:
            request: What to run.
            wake: False if the calling thread calls `run_inline` next. `Engine` decides this.

        Raises:
            ShuttingDownError: The scheduler is closing.
        """
        with self._lock:
            if self._closing:
                raise ShuttingDownError("the server is shutting down and does not accept new requests")
            number = self._queue.add(request, time.monotonic())
            if wake:
                self._wake_thread()
        # By number: a future that referred to its request would create garbage for the collector.
        request.future.add_done_callback(lambda _: self._release(number))
        return request.future

    def run_inline(self, limit_seconds: float) -> bool:
        """Runs the next batch on the calling thread if a run may start, which saves waking another thread.

        Args:
            limit_seconds: A batch that is expected to take longer, or whose batching delay has not passed, is
                left to the scheduler's threads. If nothing else runs or is queued, it may take ten times as
                long.

        Returns:
            Whether a batch ran, so that there may be another.
        """
        with self._lock:
            if not self._free_slots or not self._queue:
                return False
            now = time.monotonic()
            if self._queue.due(now) > now:
                self._wake_thread()
                return False
            batch, failures = self._take(now)
            is_idle = not self._queue and self._free_slots == self._parallel_runs - 1
            limit_seconds *= IDLE_FACTOR if is_idle else 1
            if is_long := batch is not None and batch.seconds > limit_seconds:
                self._handed_over.append(batch)
                self._wake_thread()
        _fail(failures)
        if batch is None or is_long:
            return False
        self._run(batch)
        return True

    def close(self) -> None:
        """Rejects new requests, completes the accepted ones and ends the threads."""
        with self._lock:
            self._closing = self._threads_needed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _wake_thread(self) -> None:
        self._threads_needed = True
        self._changed.notify()

    def _release(self, number: int) -> None:
        with self._lock:
            self._queue.release(number)

    def _loop(self) -> None:
        """Body of a thread. An error in it must not end the thread, which later requests need."""
        while True:
            try:
                batch = self._next()
                if batch is None:
                    return
                self._run(batch)
                del batch  # its requests must not stay alive while the thread waits
                self._trim_arena()
            except Exception:
                log.exception("scheduler failed")

    def _next(self) -> Batch | None:
        """Waits for a batch that a thread is to run; None if the scheduler is closed and empty."""
        while True:
            with self._lock:
                is_needed = self._changed.wait_for(self._has_work_for_thread, self._trimmer.wait_seconds)
                if self._handed_over:
                    if self._queue and self._free_slots:
                        self._changed.notify()
                    return self._handed_over.popleft()
                if is_needed and not self._queue and self._closing:
                    return None
                batch, failures = self._take_when_due() if is_needed else (None, [])
            _fail(failures)
            if batch:
                return batch
            self._trim_arena()

    def _has_work_for_thread(self) -> bool:
        if self._handed_over:
            return True
        if self._closing and not self._queue:
            return self._free_slots == self._parallel_runs  # no run is under way: the thread may end
        self._threads_needed = self._threads_needed and bool(self._queue)
        return self._threads_needed and self._free_slots > 0

    def _take_when_due(self) -> tuple[Batch | None, Failures]:
        now = time.monotonic()
        if not self._closing and (wait := self._queue.due(now) - now) > 0:
            self._changed.wait(wait)
            return None, []
        batch, failures = self._take(now)
        if self._queue:
            self._changed.notify()
        return batch, failures

    def _take(self, now: float) -> tuple[Batch | None, Failures]:
        """Takes the next batch. If that raises, every request fails: none may wait for a lost result."""
        try:
            batch, expired = self._queue.next(now)
        except Exception:
            log.exception("batching failed")
            return None, [(request, RunFailedError(RUN_FAILED)) for request in self._queue.clear()]
        self._free_slots -= batch is not None
        return batch, [(request, DeadlineExceededError(EXPIRED)) for request in expired]

    def _trim_arena(self) -> None:
        """Returns memory of a burst of large runs to the system, some time after the last of them."""
        with self._lock:
            model = self._trimmer.due(time.monotonic())
        if model:
            model.shrink_arena()

    def _run(self, batch: Batch) -> None:
        """Runs a batch, resolves its requests, and lets the next run start."""
        try:
            self._run_sequences(batch.graph, batch.sequences)
        except Exception:
            log.exception("batch failed", extra={"model": batch.model.name})
            _fail([(queued.request, RunFailedError(RUN_FAILED)) for queued in batch])
        finally:
            with self._lock:
                self._trimmer.note_run(batch.model, batch.scratch_bytes, time.monotonic())
                self._free_slots += 1
                if self._closing:
                    self._changed.notify_all()
                elif self._threads_needed:
                    self._changed.notify()

    def _run_sequences(self, graph: GraphKind, sequences: list[QueuedSequence]) -> None:
        """Runs sequences together; if that fails, one by one, so that only the request at fault fails."""
        model = sequences[0].request.model
        started = time.monotonic()
        try:
            outputs = run_batch(model, graph, [queued.inputs for queued in sequences])
        except Exception:
            log.exception("run failed", extra={"model": model.name, "sequences": len(sequences)})
            if len(sequences) == 1:
                _fail([(sequences[0].request, RunFailedError(RUN_FAILED))])
                return
            for queued in sequences:
                if not queued.request.future.done():
                    self._run_sequences(queued.request.graph, [queued])
            return
        self._report(sequences, started)
        for pending in self._deliver(sequences, outputs):
            pending.resolve()

    def _deliver(self, sequences: list[QueuedSequence], outputs: list[Outputs]) -> list[PendingRequest]:
        """Stores the outputs of a run and returns the requests that are complete."""
        with self._lock:
            complete = [
                queued.pending
                for queued, own in zip(sequences, outputs, strict=True)
                if queued.pending.deliver(queued.index, own)
            ]
            for pending in complete:
                self._queue.release(pending.number)
        return complete

    def _report(self, sequences: list[QueuedSequence], started: float) -> None:
        sizes = [queued.inputs.sizes for queued in sequences]
        rows = [sum(size.values()) for size in sizes]
        longest = sum(max(size[axis] for size in sizes) for axis in sizes[0])
        report = BatchReport(
            model=sequences[0].request.model.name,
            sequences=len(sequences),
            tokens=sum(rows),
            padding=longest * len(sequences) - sum(rows),
            queue_seconds=[started - queued.pending.queued_at for queued in sequences],
            seconds=time.monotonic() - started,
        )
        try:
            self._observer.batch_completed(report)
        except Exception:  # monitoring must not break what it monitors
            log.exception("observer failed")


def _fail(failures: Failures) -> None:
    for request, error in failures:
        with suppress(InvalidStateError):  # already cancelled, or another of its sequences failed first
            request.future.set_exception(error)
