"""Runs queued requests, a few batches at once, on threads of its own or inline on a caller's thread.

No lock is held when a request ends, so that whoever waits for it may submit and withdraw requests.
"""

import logging
import math
import threading
import time
from collections.abc import Callable

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server import thread_names
from attention_serving.server.engine.errors import (
    Code,
    DeadlineExceededError,
    EngineError,
    OverloadedError,
    RunFailedError,
    ShuttingDownError,
)
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.reports import EngineLoad, ExpiryStage, Observer, observe, report_run
from attention_serving.server.engine.requests.outputs import shortened
from attention_serving.server.engine.requests.validated_request import SequenceInputs, ValidatedRequest
from attention_serving.server.engine.run.execute import Outputs, gather, run_batch
from attention_serving.server.engine.run.provider import MIN_PARALLEL_RUNS
from attention_serving.server.engine.run.run_memory import ArenaTrimmer
from attention_serving.server.engine.run.session import RunControl
from attention_serving.server.engine.schedule.admission import EARLY_RESERVE, Admission
from attention_serving.server.engine.schedule.batch import Batch
from attention_serving.server.engine.schedule.dispatch import Dispatch, Next
from attention_serving.server.engine.schedule.fair_shares import ANYONE, Caller
from attention_serving.server.engine.types import Result

log = logging.getLogger(__name__)
# Runs that are expected to take longer can be ended early, if no caller waits for them any more.
TERMINABLE_SECONDS = 0.02
RUN_FAILED = "the runtime failed on this request; see the server's log"
OUT_OF_MEMORY = "the run needs more memory than the server has left for runs; try again later"
EXPIRED = "the deadline passed while the request was queued, or would have passed during its run"
# Requests that fail, each with its error.
Failures = list[tuple[ValidatedRequest, EngineError]]


class Scheduler:
    """Runs submitted requests until it is closed."""

    def __init__(
        self,
        limits: Limits,
        observer: Observer,
        *,
        parallel_runs: int = MIN_PARALLEL_RUNS,
        awake_seconds: float = 0,
    ) -> None:
        """Starts the threads.

        Args:
            limits: Bounds of batches and of the memory of runs.
            observer: Receives a report of every run.
            parallel_runs: How many runs may be under way at once.
            awake_seconds: How long the thread of `run_inline` stays awake after a run, if nothing else runs.
        """
        self._observer = observer
        self._awake_seconds = awake_seconds
        self._awake_until = 0.0
        self._dispatch = Dispatch(limits, parallel_runs)
        self._admission = Admission()
        self._trimmer = ArenaTrimmer()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Of the running batches, those that can be ended early.
        self._controls: dict[Batch, RunControl] = {}
        self._closing = False
        self._threads = [
            threading.Thread(target=self._loop, name="scheduler", daemon=True) for _ in range(parallel_runs)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, *, in_flight_bytes: int) -> EngineLoad:
        """What is queued and running now.

        Args:
            in_flight_bytes: Memory of the requests.
        """
        with self._lock:
            queue, oldest = self._dispatch.queue, self._dispatch.queue.oldest
            return EngineLoad(
                queued_sequences=queue.sequences,
                oldest_seconds=0.0 if oldest is None else time.monotonic() - oldest,
                predicted_seconds=self._admission.seconds(self._dispatch.work),
                in_flight_bytes=in_flight_bytes,
                running=len(self._dispatch.running),
                run_bytes=sum(self._dispatch.running.values()),
            )

    def check_deadline(self, deadline: float, caller: Caller = ANYONE) -> None:
        """Raises OverloadedError if even a caller's request without work of its own would be late."""
        now = time.monotonic()
        if self._admission.is_certain(self._dispatch.work, deadline, now):
            return
        with self._lock:
            waiting = self._dispatch.work_before(0.0, caller)
            self._admission.check(waiting, 0.0, deadline, now, reserve=EARLY_RESERVE)

    def submit(self, request: ValidatedRequest, *, wake: bool = True) -> None:
        """Queues a request, which ends with its result or an `EngineError`.

        Args:
            request: What to run.
            wake: False if the calling thread calls `run_inline` next. `Engine` decides this.

        Raises:
            OverloadedError: The result would come after the request's deadline.
            ShuttingDownError: The scheduler is closing.
        """
        with self._lock:
            if self._closing:
                raise ShuttingDownError("the server is shutting down and does not accept new requests")
            now = time.monotonic()
            if request.deadline != math.inf:
                self._admit(request, now)
            self._dispatch.add(request, now, inline=not wake)
            if wake:
                self._notify_if_needed()

    def fail(self, request: ValidatedRequest, error: EngineError | None) -> None:
        """Ends a request without a result, unless it has ended.

        Args:
            request: A request that was submitted.
            error: What it ends with; None if nobody waits for it any more.
        """
        if request.is_done:  # the usual case, for which it takes no lock
            return
        with self._lock:
            if not self._dispatch.release(request):
                return
            self._notify_if_needed()
            abandoned = [control for batch, control in self._controls.items() if batch.is_abandoned]
        for control in abandoned:
            control.terminate()
        self._report_failure(request, error)
        request.end(error)

    def _report_failure(self, request: ValidatedRequest, error: EngineError | None) -> None:
        now, model = time.monotonic(), request.model
        model.statistics.add_failure(now - request.queued_at)
        if error is not None:
            code = error.code
        else:
            code = Code.DEADLINE_EXCEEDED if now >= request.deadline else Code.CANCELLED
        observe(lambda: self._observer.request_failed(model.name, code))
        if code is Code.DEADLINE_EXCEEDED:
            stage = ExpiryStage.RUNNING if request.started else ExpiryStage.QUEUED
            observe(lambda: self._observer.request_expired(model.name, stage))

    def _admit(self, request: ValidatedRequest, now: float) -> None:
        if self._admission.is_certain(self._dispatch.work, request.deadline, now):
            return
        own = request.form.seconds
        self._admission.check(self._dispatch.work_before(own, request.caller), own, request.deadline, now)

    def run_inline(self, limit_seconds: float) -> bool:
        """Runs the next batch on the calling thread if a run may start, which saves waking another thread.

        Args:
            limit_seconds: A batch that is expected to take longer, or whose batching delay has not passed, is
                left to the scheduler's threads. If nothing else runs or is queued, it may take ten times as
                long.

        Returns:
            Whether to call again at once: a batch ran, so that there may be another, or the thread is to stay
            awake.
        """
        if not self._dispatch.queue:  # the usual case, for which it takes no lock
            return self._awake_until > 0 and self._stays_awake()
        with self._lock:
            batch, failures = self._take(lambda now: self._dispatch.next_inline(now, limit_seconds))
        for request, error in failures:
            self.fail(request, error)
        if batch is None:
            return False
        self._run(batch, inline=True)
        if self._awake_seconds:
            self._awake_until = time.monotonic() + self._awake_seconds
        return True

    def _stays_awake(self) -> bool:
        """Whether the next request may come soon, and would find the cores idle."""
        if not self._dispatch.running and time.monotonic() < self._awake_until:
            return True
        self._awake_until = 0.0
        return False

    def close(self) -> None:
        """Rejects new requests, completes the accepted ones and ends the threads."""
        with self._lock:
            self._closing = True
            self._dispatch.close()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _notify_if_needed(self) -> None:
        if self._dispatch.needs_thread:
            self._changed.notify()

    def _loop(self) -> None:
        """Body of a thread. An error in it must not end the thread, which later requests need."""
        thread_names.publish()
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
                if self._wait():
                    if self._dispatch.is_complete:
                        self._changed.notify_all()
                        return None
                    batch, failures = self._take(self._dispatch.next)
                else:
                    batch, failures = None, []
            while failures:  # no local variable keeps a request while the thread waits
                self.fail(*failures.pop())
            if batch:
                return batch
            self._trim_arena()

    def _wait(self) -> bool:
        """Waits until a thread is needed; returns whether one is."""
        if not self._changed.wait_for(lambda: self._dispatch.needs_thread, self._trimmer.wait_seconds):
            return False
        if (delay := self._dispatch.delay(time.monotonic())) > 0:
            self._changed.wait(delay)
            return False
        return True

    def _take(self, take: Callable[[float], Next]) -> tuple[Batch | None, Failures]:
        """Takes the next batch. If that raises, every request fails: none may wait for a lost result."""
        now = time.monotonic()
        try:
            batch, expired = take(now)
        except Exception:
            log.exception("batching failed")
            return None, [(request, RunFailedError(RUN_FAILED)) for request in self._dispatch.queue.clear()]
        if batch:
            self._admission.started(now)
            if batch.seconds >= TERMINABLE_SECONDS:
                self._controls[batch] = RunControl()
        self._notify_if_needed()
        return batch, [(request, DeadlineExceededError(EXPIRED)) for request in expired]

    def _trim_arena(self) -> None:
        """Returns memory of a burst of large runs to the system, some time after the last of them."""
        with self._lock:
            model = self._trimmer.due(time.monotonic())
        if model:
            model.shrink_arena()

    def _run(self, batch: Batch, *, inline: bool = False) -> None:
        """Runs a batch, after which its requests have ended, and lets the next run start."""
        try:
            self._compute(batch.graph, batch.sequences, self._controls.get(batch), parallel=batch.is_parallel)
        except Exception:
            log.exception("batch failed", extra={"model": batch.model.name})
            for queued in batch:
                self.fail(queued.request, RunFailedError(RUN_FAILED))
        finally:
            with self._lock:
                self._end(batch, time.monotonic(), inline=inline)

    def _compute(
        self,
        graph: GraphKind,
        sequences: list[SequenceInputs],
        control: RunControl | None,
        *,
        parallel: bool = False,
    ) -> None:
        """Runs sequences together; if that fails, one by one, so that only the request at fault fails."""
        model, started = sequences[0].request.model, time.monotonic()
        try:
            result = run_batch(model, graph, sequences, control, parallel=parallel)
        except Exception as error:
            self._failed(sequences, control, error)
            return
        report_run(self._observer, graph, sequences, started, result.times)
        complete = self._deliver(sequences, result.outputs)
        if complete:
            ended = time.monotonic()
            seconds = [ended - request.queued_at for request in complete]
            model.statistics.add_results(seconds)
            observe(lambda: self._observer.requests_answered(model.name, seconds))
        for request in complete:
            request.end(self._outcome(request))

    @staticmethod
    def _outcome(request: ValidatedRequest) -> Result | EngineError:
        """What a complete request ends with. It has left the queue: an error must not leave it waiting."""
        results, request.results = request.results, []
        try:
            outputs = gather(results)
            if request.form.dimensions:
                outputs = shortened(outputs, request.model, request.form.dimensions)
            return Result(outputs)
        except Exception:
            log.exception("result failed", extra={"model": request.model.name})
            return RunFailedError(RUN_FAILED)

    def _failed(self, sequences: list[SequenceInputs], control: RunControl | None, error: Exception) -> None:
        model = sequences[0].request.model
        if all(queued.request.is_done for queued in sequences):
            log.debug("run ended early", extra={"model": model.name})
            observe(lambda: self._observer.run_terminated(model.name))
            return
        log.error("run failed", extra={"model": model.name, "sequences": len(sequences)}, exc_info=error)
        if len(sequences) == 1:
            is_memory = isinstance(error, MemoryError)
            shown = OverloadedError(OUT_OF_MEMORY) if is_memory else RunFailedError(RUN_FAILED)
            self.fail(sequences[0].request, shown)
            return
        for queued in sequences:
            if not queued.request.is_done:
                self._compute(queued.shape.graph, [queued], control)

    def _deliver(self, sequences: list[SequenceInputs], outputs: list[Outputs]) -> list[ValidatedRequest]:
        """Stores the outputs of a run and returns the requests that are complete."""
        complete = []
        with self._lock:
            for queued, own in zip(sequences, outputs, strict=True):
                request = queued.request
                request.results[queued.index] = own
                request.missing -= 1
                if not request.missing and self._dispatch.release(request):
                    complete.append(request)
        return complete

    def _end(self, batch: Batch, now: float, *, inline: bool) -> None:
        self._controls.pop(batch, None)
        self._trimmer.note_run(batch.model, self._dispatch.running[batch], now)
        self._dispatch.ended(batch)
        self._admission.ended(batch.seconds_alone, now, busy=bool(self._dispatch.work))
        if self._closing:
            self._changed.notify_all()
        elif inline:  # the threads ask for the next batch by themselves
            self._notify_if_needed()
