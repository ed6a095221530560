"""Runs queued requests, a few batches at once, on threads of its own or inline on a caller's thread.

No lock is held when a future resolves, so that its callbacks may submit and cancel requests.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from attention_serving.server import thread_names
from attention_serving.server.engine.admission import EARLY_RESERVE, Admission
from attention_serving.server.engine.batch import Batch, PendingRequest, QueuedSequence
from attention_serving.server.engine.caller import ANYONE, Caller
from attention_serving.server.engine.dispatch import Dispatch, Next
from attention_serving.server.engine.errors import (
    Code,
    DeadlineExceededError,
    EngineError,
    RunFailedError,
    ShuttingDownError,
)
from attention_serving.server.engine.execute import Outputs
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.observer import EngineLoad, ExpiryStage, Observer
from attention_serving.server.engine.provider import MIN_PARALLEL_RUNS
from attention_serving.server.engine.run_memory import ArenaTrimmer
from attention_serving.server.engine.runner import RUN_FAILED, Failures, Runner, fail, observe
from attention_serving.server.engine.session import RunControl
from attention_serving.server.engine.types import Result
from attention_serving.server.engine.validation import ValidatedRequest

log = logging.getLogger(__name__)
# Runs that are expected to take longer can be ended early, if no caller waits for them any more.
TERMINABLE_SECONDS = 0.02
EXPIRED = "the deadline passed while the request was queued, or would have passed during its run"


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
        self._runner = Runner(observer, self._deliver)
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

    def submit(self, request: ValidatedRequest, *, wake: bool = True) -> Future[Result]:
        """Queues a request; its future resolves with the result or an `EngineError`.

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
            self._admit(request, now)
            number = self._dispatch.add(request, now, inline=not wake)
            self._notify_if_needed()
        # By number: a future that referred to its request would create garbage for the collector.
        request.future.add_done_callback(lambda future: self._ended(number, future))
        return request.future

    def _admit(self, request: ValidatedRequest, now: float) -> None:
        if self._admission.is_certain(self._dispatch.work, request.deadline, now):
            return
        own = sum([sequence.shape.seconds for sequence in request.sequences])
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
        fail(failures)
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

    def _ended(self, number: int, future: Future[Result]) -> None:
        """Removes a request whose future was resolved or cancelled."""
        if not self._dispatch.queue.holds(number):  # the usual case, for which it takes no lock
            return
        with self._lock:
            pending = self._dispatch.release(number)
            if pending is None:  # it has its result
                return
            self._notify_if_needed()
            queued_seconds = time.monotonic() - pending.queued_at
            abandoned = [control for batch, control in self._controls.items() if batch.is_abandoned]
        model = pending.request.model
        model.statistics.add_failure(queued_seconds)
        for control in abandoned:
            control.terminate()
        code = _code_of(pending.request, future)
        observe(lambda: self._observer.request_failed(model.name, code))
        if code is Code.DEADLINE_EXCEEDED:
            stage = ExpiryStage.RUNNING if pending.started else ExpiryStage.QUEUED
            observe(lambda: self._observer.request_expired(model.name, stage))

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
            fail(failures)
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
        """Runs a batch, resolves its requests, and lets the next run start."""
        try:
            self._runner.run(batch, self._controls.get(batch))
        finally:
            with self._lock:
                self._end(batch, time.monotonic(), inline=inline)

    def _end(self, batch: Batch, now: float, *, inline: bool) -> None:
        self._controls.pop(batch, None)
        self._trimmer.note_run(batch.model, self._dispatch.running[batch], now)
        self._dispatch.ended(batch)
        self._admission.ended(batch.seconds_alone, now, busy=bool(self._dispatch.work))
        if self._closing:
            self._changed.notify_all()
        elif inline:  # the threads ask for the next batch by themselves
            self._notify_if_needed()

    def _deliver(self, sequences: list[QueuedSequence], outputs: list[Outputs]) -> list[PendingRequest]:
        """Stores the outputs of a run and returns the requests that are complete."""
        with self._lock:
            complete = [
                queued.pending
                for queued, own in zip(sequences, outputs, strict=True)
                if queued.pending.deliver(queued.index, own)
            ]
            return [pending for pending in complete if self._dispatch.release(pending.number)]


def _code_of(request: ValidatedRequest, future: Future[Result]) -> Code:
    """The code that a request without a result ended with."""
    if future.cancelled():
        return Code.DEADLINE_EXCEEDED if time.monotonic() >= request.deadline else Code.CANCELLED
    error = future.exception()
    return error.code if isinstance(error, EngineError) else Code.INTERNAL
