"""The backend that computes in this process, on a model that the engine loads: neither server nor queue."""

from concurrent.futures import Future
from pathlib import Path

from attention_client.enrich.backend import BackendRequest, BackendResult, ModelSpec, Role
from attention_client.enrich.errors import EnrichError, RefusedError

from server.engine.errors import EngineError, InvalidRequestError
from server.engine.in_process import InProcessModel
from server.engine.provider import Provider
from server.engine.types import Result


class LocalBackend:
    """One model of a repository, loaded in this process."""

    def __init__(
        self,
        repository: Path,
        model: str,
        version: str = "",
        *,
        return_weights: bool = False,
        provider: str = "cpu",
        parallel: int = 0,
    ) -> None:
        """Loads the model and replays its golden vectors.

        Args:
            repository: Model repository.
            model: Name of the model.
            version: Version of the model; empty for the highest.
            return_weights: Whether to return the attention weights too.
            provider: cpu or cuda.
            parallel: How many requests to compute at once, each on one core; 0 for the number of available
                cores.

        Raises:
            EnrichError: The model does not exist or cannot be used here, or its output is not one that a job
                can store.
        """
        try:
            self._model = InProcessModel.load(
                repository, model, version, provider=Provider(provider), parallel_runs=parallel
            )
        except EngineError as error:
            raise EnrichError(error.message) from error
        self.model = ModelSpec.from_axes(
            name=self._model.name,
            version=self._model.version,
            accepts_text=self._model.takes_text,
            inputs=[spec.axes for spec in self._model.inputs],
            output=self._model.output.axes,
            parity_error=self._model.measured_error,
        )
        self.concurrency = self._model.parallel_runs
        self._return_weights = return_weights

    def submit(self, request: BackendRequest) -> "Future[BackendResult]":
        """As of Backend."""
        rows = request.inputs
        if self._model.takes_text:
            future = self._model.submit(texts=rows[Role.QUERY], return_weights=self._return_weights)
        else:
            sequences = [rows[role] for role in Role if role in rows]
            inputs = dict(zip([spec.name for spec in self._model.inputs], sequences, strict=False))
            future = self._model.submit(inputs, return_weights=self._return_weights)
        result: Future[BackendResult] = Future()
        future.add_done_callback(lambda done: _resolve(result, done))
        return result

    def close(self) -> None:
        """Cancels requests that have not started."""
        self._model.close()


def _resolve(result: "Future[BackendResult]", done: "Future[Result]") -> None:
    """Passes a result or an error of the engine on, in the terms of a job."""
    if done.cancelled() or not result.set_running_or_notify_cancel():
        result.cancel()
        return
    try:
        outputs = done.result().outputs
        vectors = next(iter(outputs.values()))
        result.set_result(BackendResult(vectors, outputs.get("attention_weights")))
    except InvalidRequestError as error:
        result.set_exception(RefusedError(error.message, error.reason))
    except EngineError as error:
        result.set_exception(EnrichError(error.message))
    except Exception as error:
        result.set_exception(error)
