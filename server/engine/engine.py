"""The engine as its callers see it: a decoded request in, a future of its result out."""

import threading
from concurrent.futures import Future

from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.observer import Observer, Unobserved
from server.engine.repository import Repository
from server.engine.scheduler import PARALLEL_RUNS, Scheduler
from server.engine.types import Request, Result
from server.engine.validation import validate

# How long a run may keep a thread that has calls to receive from them.
SHORT_RUN_SECONDS = 0.0005


class Engine:
    """Answers requests to the models of a repository."""

    def __init__(
        self,
        repository: Repository,
        limits: Limits | None = None,
        observer: Observer | None = None,
        *,
        short_run_seconds: float = SHORT_RUN_SECONDS,
        parallel_runs: int = PARALLEL_RUNS,
    ) -> None:
        """Starts the engine's threads.

        Args:
            repository: The models.
            limits: How much may be held.
            observer: Told of every run.
            short_run_seconds: What a run may be expected to take on the thread of a caller who takes `turn`.
            parallel_runs: How many runs may go on at once.
        """
        self.repository = repository
        self.limits = limits or Limits()
        self._short_run_seconds = short_run_seconds
        # Its submissions wake no other thread, because it calls run_inline next.
        self._inline_thread: int | None = None
        self._scheduler = Scheduler(self.limits, observer or Unobserved(), parallel_runs=parallel_runs)

    def model(self, name: str, version: str = "") -> LoadedModel:
        """A loaded model; the highest version that answers if none is given.

        Raises:
            ModelNotFoundError: There is no such model or version.
            ModelNotReadyError: The model failed to load.
        """
        return self.repository.ready(name, version)

    def submit(self, model: LoadedModel, request: Request) -> Future[Result]:
        """Validates a request and queues it.

        Args:
            model: As returned by `model`.
            request: The decoded request.

        Returns:
            A future that resolves with the result or an `EngineError`. Cancelling it gives the request up.

        Raises:
            EngineError: The request is refused; nothing was queued.
        """
        wake = threading.get_ident() != self._inline_thread
        return self._scheduler.submit(validate(request, model, self.limits), wake=wake)

    def run_inline(self) -> bool:
        """Runs the next batch on the calling thread if it is short; returns whether there may be more.

        A thread that calls this once must go on calling it: what it submits from then on wakes no other
        thread.
        """
        self._inline_thread = threading.get_ident()
        return self._scheduler.run_inline(self._short_run_seconds)

    def close(self) -> None:
        """Takes no more requests, and returns when those that were accepted have their results."""
        self._scheduler.close()
