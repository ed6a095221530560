"""The engine as its callers see it: a decoded request in, a future of its result out."""

from concurrent.futures import Future

from server.engine.limits import Limits
from server.engine.observer import Observer, Unobserved
from server.engine.repository import Repository
from server.engine.scheduler import Scheduler
from server.engine.validation import validate
from server.engine.values import Request, Result


class Engine:
    """Answers requests to the models of a repository."""

    def __init__(
        self, repository: Repository, limits: Limits | None = None, observer: Observer | None = None
    ) -> None:
        self.repository = repository
        self.limits = limits or Limits()
        self._scheduler = Scheduler(self.limits, observer or Unobserved())

    def submit(self, request: Request, *, run_here: bool = False) -> Future[Result]:
        """Validates a request and queues it.

        Args:
            request: What the caller asks for.
            run_here: Whether the calling thread may run it, where nothing else runs or waits.

        Returns:
            A future that resolves with the result or an `EngineError`. Cancelling it gives the request up.

        Raises:
            EngineError: The request is refused; nothing was queued.
        """
        model = self.repository.ready(request.model_name, request.model_version)
        return self._scheduler.submit(validate(request, model, self.limits), run_here=run_here)

    def close(self) -> None:
        """Takes no more requests, and returns when those that were accepted have their results."""
        self._scheduler.close()
