"""Queues requests, and runs a few batches at once: on threads of its own, or inline on a caller's thread.

No lock is held when a request ends, so that whoever waits for it may submit and withdraw requests.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import coroutine
from typing import Any

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.coroutines import Wait
from attention_serving.server.engine.budget import ANYONE, Caller, MemoryBudget, Reservation
from attention_serving.server.engine.contexts import ContextStore
from attention_serving.server.engine.errors import (
    Code,
    DeadlineExceededError,
    EngineError,
    OverloadedError,
    RunFailedError,
    ShuttingDownError,
)
from attention_serving.server.engine.events import (
    EngineLoad,
    EventLog,
    ExpiryStage,
    FailureEvent,
    RunEvent,
    TerminationEvent,
    Timeline,
)
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.outputs import finish_embeddings
from attention_serving.server.engine.requests.request import Request, SequenceInputs
from attention_serving.server.engine.requests.shared_prefix import follow_prefix, prefix_of
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.execute import Outputs, RunTimestamps, run_batch
from attention_serving.server.engine.run.provider import MIN_PARALLEL_RUNS
from attention_serving.server.engine.run.session import RunControl
from attention_serving.server.engine.schedule.batch import Batch
from attention_serving.server.engine.schedule.queue import Queue
from attention_serving.server.engine.types import DecodedRequest, Result

log = logging.getLogger(__name__)
# How long a run may occupy the thread that drives the calls, in seconds.
INLINE_SECONDS = 0.0005
# Runs that are expected to take longer can be ended early, if no caller waits for them any more.
TERMINABLE_SECONDS = 0.02
# Smaller runs leave too little memory in the runtime's arena to matter. That of large ones is returned to the
# system this many seconds after the last of them, when no other is expected soon.
LARGE_RUN_BYTES, TRIM_SECONDS = 64 << 20, 5.0
RUN_FAILED = "the runtime failed on this request; see the server's log"
OUT_OF_MEMORY = "the run needs more memory than the server has left for runs; try again later"
EXPIRED_MESSAGE = "the deadline passed while the request was queued, or would have passed during its run"
CLOSING_MESSAGE = "the server is shutting down and does not accept new requests"


class Engine:
    """Answers requests to the models of a repository.

    Attributes:
        repository: The models.
        limits: Bounds of requests, batches and memory.
        budget: The memory of the requests in flight.
        contexts: Projected keys and values that requests attend to.
        events: What happens here.
        on_run_completed: Called with the model, graph, sequences and outputs of each run that succeeds; None
            for nobody.
    """

    def __init__(
        self,
        repository: Repository,
        limits: Limits | None = None,
        events: EventLog | None = None,
        *,
        spin_seconds: float = 0,
        parallel_runs: int = MIN_PARALLEL_RUNS,
        computing_runs: int = 0,
        context_folder: Path | None = None,
    ) -> None:
        """Starts the engine's threads.

        Args:
            repository: The models.
            limits: Bounds of requests, batches and memory in flight.
            events: Receives an event for every run and every failed request.
            spin_seconds: How long the thread that calls `run_inline` does not sleep after a run, if no other
                run is under way.
            parallel_runs: How many runs may be under way at once.
            computing_runs: How many of them compute at once; 0 for all.
            context_folder: Where stored contexts are kept across restarts; None for nowhere.
        """
        self.repository = repository
        self.limits = limits or Limits()
        self.budget = MemoryBudget(self.limits.max_in_flight_bytes)
        self.contexts = ContextStore(self.limits.max_context_bytes, context_folder)
        self.on_run_completed: (
            Callable[[LoadedModel, GraphKind, list[SequenceInputs], list[Outputs]], None] | None
        ) = None
        self.events = events or EventLog()
        self._spin_seconds, self._spin_until = spin_seconds, 0.0
        # Submissions of this thread wake no other thread, because it calls run_inline next.
        self._inline_thread: int | None = None
        self._lock = threading.Lock()
        self._work_available = threading.Condition(self._lock)
        self._queue = Queue(self.limits, parallel_runs, computing_runs)
        self._closing = False
        # The model of the last large run, and when to trim the arena with it.
        self._model_to_trim: LoadedModel | None = None
        self._trim_at = 0.0
        self._threads = [
            threading.Thread(target=self._loop, name="scheduler", daemon=True) for _ in range(parallel_runs)
        ]
        for thread in self._threads:
            thread.start()

    def validate(self, model: LoadedModel, decoded: DecodedRequest) -> Request:
        """Checks a decoded request against its model and the limits.

        Raises:
            EngineError: The request is refused.
        """
        return validate(decoded, model, self.limits)

    @coroutine
    def submit_and_wait(
        self, request: Request, reservation: Reservation, message_bytes: int = 0
    ) -> Generator[Wait, Any, Result]:
        """Queues a request and waits for its result. If the coroutine is closed, the request is withdrawn.

        Args:
            request: The request.
            reservation: The memory that the request takes is added to it. Its timeline receives the stages of
                the request.
            message_bytes: Size of the received message, if the reservation does not contain it yet.

        Raises:
            EngineError: The request is refused, or fails.
        """
        if (timeline := reservation.timeline) is not None:  # its runs follow
            request.timeline = timeline
            timeline.model, timeline.version = request.model.name, request.model.version
            timeline.sequences = len(request.sequences)
            timeline.rows = sum([sequence.plan.rows for sequence in request.sequences])
            timeline.queued_at = time.monotonic()
        if GraphKind.PREFIX in request.model.manifest.graphs:
            prefix = prefix_of(request, self.limits)
            if prefix is not None:
                self._reserve_and_submit(prefix, reservation, message_bytes)
                result = yield from self._wait_for(prefix)
                request, message_bytes = follow_prefix(request, prefix, result), 0
                del result  # the request has its arrays
        self._reserve_and_submit(request, reservation, message_bytes)
        return (yield from self._wait_for(request))

    def _reserve_and_submit(self, request: Request, reservation: Reservation, message_bytes: int) -> None:
        """Queues a request, and reports if it is refused."""
        try:
            reservation.add(message_bytes + request.plan.required_bytes)
            self.submit(request, wake=threading.get_ident() != self._inline_thread)
        except EngineError as error:
            self.report_failure(request.model, error, reservation)
            raise

    def _wait_for(self, request: Request) -> Generator[Wait, Any, Result]:
        """The result of a request that was submitted."""
        try:
            yield request.wait
        finally:
            if not request.is_done:
                self.fail(request, None)
        return request.take_result()

    def submit(self, request: Request, *, wake: bool = True) -> None:
        """Queues a request, which ends with its result or an `EngineError`.

        Args:
            request: What to run. Its memory is the caller's to reserve.
            wake: False if the calling thread calls `run_inline` next.

        Raises:
            OverloadedError: The result would come after the request's deadline.
            ShuttingDownError: The engine is closing.
        """
        queue, deadline = self._queue, request.deadline
        with self._lock:
            if self._closing:
                raise ShuttingDownError(CLOSING_MESSAGE)
            now = time.monotonic()
            if deadline != math.inf and not queue.deadline_is_far(deadline, now):
                queue.check(deadline, now, request.caller, request.plan.seconds)
            queue.add(request, now, inline=not wake)
            if wake:
                self._notify_if_needed()

    def fail(self, request: Request, error: EngineError | None) -> None:
        """Ends a request without a result, unless it has ended.

        Args:
            request: A request that was submitted.
            error: What it ends with; None if no caller waits for it any more.
        """
        with self._lock:
            has_started = self._queue.has_started(request)
            if not self._queue.release(request):
                return
            self._notify_if_needed()
            running = tuple(self._queue.running)
        for batch in running:
            if batch.control and all(sequence.request.is_done for sequence in batch):  # nobody waits for it
                batch.control.terminate()
        now, model = time.monotonic(), request.model
        if error is not None:
            code = error.code
        else:
            code = Code.DEADLINE_EXCEEDED if now >= request.deadline else Code.CANCELLED
        stage = None
        if code is Code.DEADLINE_EXCEEDED:
            stage = ExpiryStage.RUNNING if has_started else ExpiryStage.QUEUED
        seconds = now - request.queued_at + request.prefix_seconds
        self.events.add(FailureEvent(model.name, code, model.statistics, seconds, stage))
        request.end(error)

    def report_failure(
        self, model: LoadedModel, error: Exception, reservation: Reservation | None = None
    ) -> None:
        """Reports that a request failed after its model was found, and before it was queued.

        The error states the digest of the model: another model might not refuse the request.

        Args:
            model: As returned by `model`.
            error: What was raised.
            reservation: That of the request, whose timeline receives the model; None without one.
        """
        if reservation is not None and (timeline := reservation.timeline) is not None:
            timeline.model, timeline.version, timeline.queued_at = model.name, model.version, 0.0
        code = Code.INTERNAL
        if isinstance(error, EngineError):
            code, error.model_digest = error.code, model.digest
        self.events.add(FailureEvent(model.name, code))

    def check_deadline(self, deadline: float, caller: Caller = ANYONE) -> None:
        """Refuses a call before its message is received, if the work that is queued leaves no time for it.

        Args:
            deadline: When the caller stops waiting, on `time.monotonic`'s clock.
            caller: Whose call it is.

        Raises:
            OverloadedError: The result would come too late.
        """
        now = time.monotonic()
        if not self._queue.deadline_is_far(deadline, now):  # the unusual case, for which it takes the lock
            with self._lock:
                self._queue.check(deadline, now, caller)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or runs."""
        return not (self._queue or self._queue.running)

    def load(self) -> EngineLoad:
        """What the engine holds now."""
        contexts = self.contexts
        contexts.purge()
        with self._lock:
            queue, oldest = self._queue, self._queue.oldest
            return EngineLoad(
                queue_depth=queue.sequences,
                queue_age_seconds=0.0 if oldest is None else time.monotonic() - oldest,
                predicted_queue_seconds=queue.latency.seconds(queue.work),
                in_flight_bytes=self.budget.held_bytes,
                runs=len(queue.running),
                run_memory_bytes=sum(queue.running.values()),
                context_bytes=contexts.held_bytes,
                context_hits=contexts.hits,
                context_misses=contexts.misses,
                context_evictions=contexts.evictions,
                context_folder_errors=contexts.folder_errors,
            )

    def run_inline(self, limit_seconds: float = INLINE_SECONDS) -> bool:
        """Runs the next batch on the calling thread if it is short, which saves waking another thread.

        One thread at most may call this, and must then do so after everything that it submits: its
        submissions wake no other thread.

        Args:
            limit_seconds: A batch that is expected to take longer is left to the engine's threads. If nothing
                else runs or is queued, it may take ten times as long.

        Returns:
            Whether to call again at once: a batch ran, so that there may be another, or the thread is not to
            sleep yet.
        """
        self._inline_thread = threading.get_ident()
        if not self._queue:  # the usual case, for which it takes no lock
            # The next request may come soon, and would find the cores idle.
            if self._spin_until and (self._queue.running or time.monotonic() >= self._spin_until):
                self._spin_until = 0.0
            return self._spin_until > 0
        batch = self._take(limit_seconds)
        if batch is None:
            return False
        self._run_batch(batch, inline=True)
        if self._spin_seconds:
            self._spin_until = time.monotonic() + self._spin_seconds
        return True

    def close(self) -> None:
        """Rejects new requests, and returns when the accepted ones have their results."""
        with self._lock:
            self._closing = True
            self._queue.close()
            self._work_available.notify_all()
        for thread in self._threads:
            thread.join()

    def _loop(self) -> None:
        """Body of a thread. An error in it must not end the thread, which later requests need."""
        while not self._queue.is_complete:
            try:
                if self._wait() and (batch := self._take()):
                    self._run_batch(batch)
                    del batch  # its requests must not stay alive while the thread waits
            except Exception:
                log.exception("scheduler failed")
        with self._lock:
            self._work_available.notify_all()  # the other threads end too

    def _wait(self) -> bool:
        """Waits until a thread is needed; returns whether one is.

        If none is for some time after a burst of large runs, their memory is returned to the system.
        """
        with self._lock:
            timeout = self._trim_at - time.monotonic() if self._model_to_trim else None
            if self._work_available.wait_for(lambda: self._queue.needs_thread, timeout):
                return True
            if time.monotonic() < self._trim_at:
                return False
            model, self._model_to_trim = self._model_to_trim, None
        if model:
            model.shrink_arena()
        return False

    def _take(self, inline_seconds: float | None = None) -> Batch | None:
        """Takes the next batch, inline if a limit of its seconds is given.

        If that raises, every request fails: none may wait for a lost result.
        """
        queue, is_broken = self._queue, False
        with self._lock:
            now = time.monotonic()
            try:
                if inline_seconds is None:
                    batch, failed = queue.next(now)
                else:
                    batch, failed = queue.next_inline(now, inline_seconds)
            except Exception:
                log.exception("batching failed")
                batch, failed, is_broken = None, queue.clear(), True
            self._notify_if_needed()
        for request in failed:
            error = RunFailedError(RUN_FAILED) if is_broken else DeadlineExceededError(EXPIRED_MESSAGE)
            self.fail(request, error)
        return batch

    def _notify_if_needed(self) -> None:
        if self._queue.needs_thread:
            self._work_available.notify()

    def _run_batch(self, batch: Batch, *, inline: bool = False) -> None:
        """Runs a batch, after which its requests have ended, and lets the next run start."""
        model, sequences = batch.model, batch.sequences
        try:
            if batch.seconds >= TERMINABLE_SECONDS:
                batch.control = RunControl()
            try:
                outputs, timestamps = run_batch(
                    model, batch.graph, sequences, batch.control, parallel=batch.is_parallel
                )
            except Exception as error:
                self._report_failed_run(model, sequences, error)
                if len(sequences) > 1:
                    self._run_singly(batch)
            else:
                batch.run_seconds = timestamps[-1] - timestamps[0]
                self._deliver(model, batch.graph, sequences, outputs, timestamps, batch.rows)
        except Exception:
            log.exception("batch failed", extra={"model": model.name})
            for sequence in batch:
                self.fail(sequence.request, RunFailedError(RUN_FAILED))
        finally:
            with self._lock:
                now = time.monotonic()
                if batch.run_bytes >= LARGE_RUN_BYTES:
                    self._model_to_trim, self._trim_at = model.base_model or model, now + TRIM_SECONDS
                self._queue.end_batch(batch, now)
                if inline:  # the threads ask for the next batch by themselves
                    self._notify_if_needed()

    def _run_singly(self, batch: Batch) -> None:
        """Runs each sequence of a batch alone, so that only the request at fault fails."""
        model = batch.model
        for sequence in batch:
            if sequence.request.is_done:
                continue
            kind = sequence.plan.graph
            try:
                outputs, timestamps = run_batch(model, kind, [sequence], batch.control)
            except Exception as error:
                self._report_failed_run(model, [sequence], error)
            else:
                self._deliver(model, kind, [sequence], outputs, timestamps, sequence.plan.computed_rows)

    def _report_failed_run(
        self, model: LoadedModel, sequences: list[SequenceInputs], error: Exception
    ) -> None:
        """Reports a run that failed, and fails the request of one that had a single sequence."""
        if all(sequence.request.is_done for sequence in sequences):
            log.debug("run ended early", extra={"model": model.name})
            self.events.add(TerminationEvent(model.name))
            return
        log.error("run failed", extra={"model": model.name, "sequences": len(sequences)}, exc_info=error)
        if len(sequences) == 1:
            is_memory = isinstance(error, MemoryError)
            failure = OverloadedError(OUT_OF_MEMORY) if is_memory else RunFailedError(RUN_FAILED)
            self.fail(sequences[0].request, failure)

    def _deliver(
        self,
        model: LoadedModel,
        kind: GraphKind,
        sequences: list[SequenceInputs],
        outputs: list[Outputs],
        timestamps: RunTimestamps,
        computed_rows: int,
    ) -> None:
        """Stores the outputs of a run, and ends the requests that are complete."""
        complete: list[Request] = []
        queued_at, latencies, rows, ended = list[float](), list[float](), 0, time.monotonic()
        timelines = dict[Timeline, None]()
        with self._lock:
            for sequence, arrays in zip(sequences, outputs, strict=True):
                request = sequence.request
                queued_at.append(request.queued_at)
                rows += sequence.plan.rows
                if request.timeline is not None:  # a request may have several sequences in the run
                    timelines[request.timeline] = None
                request.outputs[sequence.index] = arrays
                request.unfinished_sequences -= 1
                if not request.unfinished_sequences and self._queue.release(request):
                    complete.append(request)
                    if not request.is_prefix:
                        latencies.append(ended - request.queued_at + request.prefix_seconds)
            names = model.name, model.version, model.manifest.precision
            padding = computed_rows - rows
            event = RunEvent(*names, model.statistics, kind, rows, padding, *timestamps, queued_at, latencies)
            for timeline in timelines:  # before another run ends one of the requests
                timeline.runs += (event,)
                if timeline.reference is not None:
                    event.span_contexts.append(timeline.reference)
        try:
            self.events.add(event)
            if self.on_run_completed is not None:  # before callers may change what inputs are views of
                self.on_run_completed(model, kind, sequences, outputs)
        except Exception:
            log.exception("run not reported", extra={"model": model.name})
        for request in complete:
            request.end(_outcome(request))


def _outcome(request: Request) -> Result | EngineError:
    """What a complete request ends with. It has left the queue: an error must not leave it waiting."""
    sequences, request.outputs = request.outputs, []
    try:
        outputs = {name: [arrays[name] for arrays in sequences] for name in sequences[0]}
        plan = request.plan
        return Result(finish_embeddings(outputs, plan.dimensions, normalises=plan.normalises))
    except Exception:
        log.exception("result failed", extra={"model": request.model.name})
        return RunFailedError(RUN_FAILED)
