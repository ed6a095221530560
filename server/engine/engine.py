"""The engine as its callers see it: a decoded request in, its result out."""

import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from attention_serving.server.coroutines import suspend
from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.errors import Code, DeadlineExceededError, EngineError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.reports import EngineLoad, NullObserver, Observer, observe
from attention_serving.server.engine.requests.texts import encode_texts
from attention_serving.server.engine.requests.validated_request import ValidatedRequest
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.provider import MIN_PARALLEL_RUNS
from attention_serving.server.engine.schedule.fair_shares import ANYONE, Caller
from attention_serving.server.engine.schedule.scheduler import Scheduler
from attention_serving.server.engine.statistics import Timeline
from attention_serving.server.engine.types import Request, Result

# How long a run may occupy the thread that receives calls, and that reads their sockets, in seconds.
INLINE_SECONDS = 0.0005


class Engine:
    """Answers requests to the models of a repository.

    Attributes:
        repository: The models.
        limits: Bounds of requests, batches and memory.
        budget: The memory of the requests in flight.
    """

    def __init__(
        self,
        repository: Repository,
        limits: Limits | None = None,
        observer: Observer | None = None,
        *,
        inline_seconds: float = INLINE_SECONDS,
        awake_seconds: float = 0,
        parallel_runs: int = MIN_PARALLEL_RUNS,
    ) -> None:
        """Starts the engine's threads.

        Args:
            repository: The models.
            limits: Bounds of requests, batches and memory in flight.
            observer: Receives a report of every run.
            inline_seconds: Longest expected duration of a run on the thread that calls `run_inline`.
            awake_seconds: How long the thread that calls `run_inline` stays awake after a run, if no other
                run is under way.
            parallel_runs: How many runs may be under way at once.
        """
        self.repository = repository
        self.limits = limits or Limits()
        self.budget = MemoryBudget(self.limits.max_in_flight_bytes)
        self._inline_seconds = inline_seconds
        # Submissions of this thread wake no other thread, because it calls run_inline next.
        self._inline_thread: int | None = None
        self._observer = observer or NullObserver()
        self._scheduler = Scheduler(
            self.limits,
            self._observer,
            parallel_runs=parallel_runs,
            awake_seconds=awake_seconds,
        )

    def model(self, name: str, version: str = "") -> LoadedModel:
        """A loaded model: the given version, or the highest one that loaded.

        Raises:
            ModelNotFoundError: The model or version does not exist.
            ModelNotReadyError: The model failed to load.
        """
        return self.repository.ready(name, version)

    def encode_texts(
        self, model: LoadedModel, request: Request, reservation: Reservation | None = None
    ) -> Request:
        """The request with token ids in place of its texts, so that their number is known to `validate`.

        Raises:
            EngineError: The texts are refused.
        """
        return encode_texts(request, model, self.limits, reservation)

    def validate(self, model: LoadedModel, request: Request) -> ValidatedRequest:
        """Checks a decoded request against its model and the limits.

        Raises:
            EngineError: The request is refused.
        """
        return validate(request, model, self.limits)

    async def run(self, request: ValidatedRequest, reservation: Reservation) -> Result:
        """Queues a request and waits for its result. If the coroutine is closed, the request is withdrawn.

        Args:
            request: The request.
            reservation: Holds the memory of the received message. What the request takes in addition is added
                to it. Its timeline receives the stages of the request.

        Raises:
            EngineError: The request is refused, or fails.
        """
        try:
            self.budget.add(reservation, request.form.held_bytes)
            if reservation.timeline is not None:
                _record(request, reservation.timeline)
            self._scheduler.submit(request, wake=threading.get_ident() != self._inline_thread)
        except EngineError as error:
            self.refused(request.model, error, reservation)
            raise
        try:
            await suspend(request.wait)
        finally:
            if not request.is_done:
                self._scheduler.fail(request, None)
        return request.result()

    def submit(self, model: LoadedModel, request: Request) -> Future[Result]:
        """Validates a request and queues it, for callers who are no coroutines.

        Its memory is reserved until it has ended.

        Returns:
            A future that resolves with the result or an `EngineError`. Cancelling it withdraws the request.

        Raises:
            EngineError: The request is refused; nothing was queued.
        """
        return self.queue(self.validate(model, request))

    def queue(self, request: ValidatedRequest) -> Future[Result]:
        """As `submit`, for a request that was validated."""
        future: Future[Result] = Future()
        reservation = self.budget.reserve(request.form.input_bytes + request.form.held_bytes)
        try:
            self._scheduler.submit(request)
        except EngineError:
            reservation.release()
            raise

        def resolve() -> None:
            outcome = request.outcome
            with suppress(InvalidStateError):  # cancelled
                # Not raised here: the frame of an error refers to the future that keeps it.
                if isinstance(outcome, Result):
                    future.set_result(outcome)
                else:
                    future.set_exception(outcome)

        def resolved(_future: Future[Result]) -> None:
            reservation.release()
            self._scheduler.fail(request, None)

        future.add_done_callback(resolved)
        request.then(resolve)
        return future

    def expire(self, request: ValidatedRequest) -> None:
        """Ends a request whose own deadline, which is before that of its call, has passed."""
        error = DeadlineExceededError("the deadline passed before the result was computed")
        self._scheduler.fail(request, error)

    def refused(self, model: LoadedModel, error: Exception, reservation: Reservation | None = None) -> None:
        """Reports that a request was refused after its model was found, and before it was queued.

        Args:
            model: As returned by `model`.
            error: What was raised.
            reservation: That of the request, whose timeline is told of the model; None without one.
        """
        if reservation is not None and reservation.timeline is not None:
            reservation.timeline.model, reservation.timeline.version = model.name, model.version
        code = error.code if isinstance(error, EngineError) else Code.INTERNAL
        observe(lambda: self._observer.request_failed(model.name, code))

    def check_deadline(self, deadline: float, caller: Caller = ANYONE) -> None:
        """Refuses a call before its message is received, if the work that is queued leaves no time for it.

        Args:
            deadline: When the caller stops waiting, on `time.monotonic`'s clock.
            caller: Whose call it is.

        Raises:
            OverloadedError: The result would come too late.
        """
        self._scheduler.check_deadline(deadline, caller)

    def load(self) -> EngineLoad:
        """What the engine holds now."""
        return self._scheduler.load(in_flight_bytes=self.budget.held_bytes)

    def run_inline(self) -> bool:
        """Runs the next batch on the calling thread if it is short; returns whether to call again at once.

        One thread at most may call this, and must then do so after everything that it submits: its
        submissions wake no other thread.
        """
        self._inline_thread = threading.get_ident()
        return self._scheduler.run_inline(self._inline_seconds)

    def close(self) -> None:
        """Rejects new requests, and returns when the accepted ones have their results."""
        self._scheduler.close()


def _record(request: ValidatedRequest, timeline: Timeline) -> None:
    """Notes that a request enters the queue; its runs follow."""
    request.timeline = timeline
    timeline.model, timeline.version = request.model.name, request.model.version
    timeline.sequences = len(request.sequences)
    timeline.rows = sum([sequence.shape.rows for sequence in request.sequences])
    timeline.queued_at = time.monotonic()
