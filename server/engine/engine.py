"""The engine as its callers see it: a decoded request in, a future of its result out."""

from concurrent.futures import Future

from server.engine.limits import Limits
from server.engine.observer import Observer, Unobserved
from server.engine.repository import Repository
from server.engine.scheduler import PARALLEL_RUNS, Scheduler
from server.engine.validation import validate
from server.engine.values import Request, Result

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
        self._scheduler = Scheduler(self.limits, observer or Unobserved(), parallel_runs=parallel_runs)

    def submit(self, request: Request, *, wake: bool = True) -> Future[Result]:
        """Validates a request and queues it.

        Args:
            request: What the caller asks for.
            wake: Whether to call a thread of the engine. A caller who says no calls `turn` afterwards.

        Returns:
            A future that resolves with the result or an `EngineError`. Cancelling it gives the request up.

        Raises:
            EngineError: The request is refused; nothing was queued.
        """
        model = self.repository.ready(request.model_name, request.model_version)
        return self._scheduler.submit(validate(request, model, self.limits), wake=wake)

    def turn(self) -> bool:
        """Runs what is next on the calling thread where that is short; whether there may be more to run."""
        return self._scheduler.turn(self._short_run_seconds)

    def close(self) -> None:
        """Takes no more requests, and returns when those that were accepted have their results."""
        self._scheduler.close()
