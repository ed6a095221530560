"""Computes in this process, on a model that the engine loads: no server, no queue."""

from concurrent.futures import Future
from math import ceil
from pathlib import Path

from attention_client.enrich.computing import (
    Answer,
    ModelFacts,
    Request,
    Role,
    output_width,
    widths_of,
)
from attention_client.enrich.errors import EnrichError, RefusedError
from attention_client.enrich.tables import WINDOW_BYTES
from attention_client.enrich.windows import REQUEST_BYTES

from server.engine.errors import EngineError, InvalidRequestError
from server.engine.in_process import InProcessModel
from server.engine.provider import Provider
from server.engine.types import Result

# A window of rows makes at least so many requests where rows are many.
WINDOW_REQUESTS = WINDOW_BYTES // REQUEST_BYTES


class LocalComputer:
    """One model of a repository, loaded here."""

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
            parallel: Requests at once, each on one core; 0 for the number of available cores.

        Raises:
            EnrichError: The model does not exist, or cannot be used here.
        """
        try:
            self._model = InProcessModel.load(
                repository, model, version, provider=Provider(provider), parallel_runs=parallel
            )
        except EngineError as error:
            raise EnrichError(error.message) from error
        self.facts = facts_of(self._model)
        self.windows_ahead = 2 + ceil(self._model.parallel_runs / WINDOW_REQUESTS)
        self._return_weights = return_weights

    def submit(self, request: Request) -> "Future[Answer]":
        """As of Computer."""
        rows = request.inputs
        if self._model.takes_text:
            future = self._model.submit(texts=rows[Role.QUERY], return_weights=self._return_weights)
        else:
            names = [spec.name for spec in self._model.inputs]
            sequences = [rows[role] for role in Role if role in rows]
            inputs = dict(zip(names, sequences, strict=False))
            future = self._model.submit(inputs, return_weights=self._return_weights)
        answer: Future[Answer] = Future()
        future.add_done_callback(lambda done: _resolve(answer, done))
        return answer

    def close(self) -> None:
        """Cancels requests that have not started."""
        self._model.close()


def _resolve(answer: "Future[Answer]", done: "Future[Result]") -> None:
    """Passes a result or an error of the engine on, in the terms of a job."""
    if done.cancelled() or not answer.set_running_or_notify_cancel():
        answer.cancel()
        return
    try:
        vectors, *weights = done.result().outputs.values()
        answer.set_result(Answer(vectors, weights[0] if weights else None))
    except InvalidRequestError as error:
        answer.set_exception(RefusedError(error.message, error.reason))
    except EngineError as error:
        answer.set_exception(EnrichError(error.message))
    except Exception as error:
        answer.set_exception(error)


def facts_of(model: InProcessModel) -> ModelFacts:
    """What a job must know of a model.

    Raises:
        EnrichError: It makes no vectors of sequences.
    """
    return ModelFacts(
        name=model.name,
        version=model.version,
        takes_text=model.takes_text,
        widths=widths_of([spec.axes for spec in model.inputs]),
        output_width=output_width(model.name, model.output.name, model.output.axes),
        parity_error=model.measured_error,
    )
