"""Computes in this process, on the engine's own models: no server, no queue.

All that is to be computed is known beforehand, so runs are planned rather than scheduled: sequences of equal
length run together. That wastes nothing on padding, and makes the same rows give the same bits.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import numpy as np
from attention_client.enrich.backend import BackendRequest, BackendResult, ModelSpec, Role
from attention_client.enrich.errors import EnrichError, RefusedError

from artifact.manifest import POSITIONS, ArtifactError, GraphKind
from server import cores
from server.engine.errors import EngineError, InvalidRequestError, LimitExceededError
from server.engine.execute import run_batch
from server.engine.limits import Limits
from server.engine.model import LoadedModel, load_model
from server.engine.session import Device, Provider, ProviderError
from server.engine.types import Array, Item, Ragged, Work
from server.engine.types import Request as EngineRequest
from server.engine.validation import validate

# Where runs are not spread over cores: while one request is prepared or copied, another computes.
PARALLEL_ON_CUDA = 2


class LocalBackend:
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
            repository: Folder of artifacts.
            model: Name of the model.
            version: Its version; empty for the highest.
            return_weights: Whether to return the attention weights too.
            provider: cpu or cuda.
            parallel: Requests at once, each on one core; 0 for as many as there are cores. Many runs side by
                side get more from the cores than one run on all of them.

        Raises:
            EnrichError: There is no such model, or it misses its tolerance here.
        """
        on_cuda = provider == Provider.CUDA
        parallel = PARALLEL_ON_CUDA if on_cuda else parallel or cores.available()
        device = Device(Provider(provider), threads=0 if on_cuda else 1)
        try:
            self._model = load_model(_folder(repository, model, version), device)
        except (ArtifactError, ProviderError) as error:
            raise EnrichError(str(error)) from error
        self.model = spec_of(self._model)
        self.concurrency = parallel
        self._return_weights = return_weights
        self._limits = Limits()
        self._threads = ThreadPoolExecutor(parallel, "enrich")

    def submit(self, request: BackendRequest) -> "Future[BackendResult]":
        """As of Backend."""
        return self._threads.submit(self._compute, request)

    def close(self) -> None:
        """Ends what is under way."""
        self._threads.shutdown(cancel_futures=True)

    def _compute(self, request: BackendRequest) -> BackendResult:
        try:
            work = validate(self._engine_request(request), self._model, self._limits)
        except (InvalidRequestError, LimitExceededError) as error:
            raise RefusedError(error.message, error.reason) from error
        except EngineError as error:
            raise EnrichError(error.message) from error
        results = self._run(work)
        vectors = [result[self._model.default_outputs[0]] for result in results]
        weights = [result["attention_weights"] for result in results] if self._return_weights else None
        return BackendResult(vectors, weights)

    def _engine_request(self, request: BackendRequest) -> EngineRequest:
        texts: tuple[str, ...] = ()
        inputs: dict[str, Ragged] = {}
        if self.model.accepts_text:
            texts = tuple(request.inputs[Role.QUERY])
        else:
            names = [spec.name for spec in self._model.inputs if spec.name != POSITIONS]
            by_name = zip(
                names, (request.inputs[role] for role in Role if role in request.inputs), strict=False
            )
            inputs = {name: _ragged(rows) for name, rows in by_name}
        return EngineRequest(inputs=inputs, texts=texts, return_weights=self._return_weights)

    def _run(self, work: Work) -> list[dict[str, Array]]:
        """Runs sequences of equal length together, and returns results in the order of the work."""
        order = sorted(range(len(work.items)), key=lambda index: _lengths(work.items[index]))
        results: list[dict[str, Array]] = [{}] * len(order)
        for _, group in groupby(order, key=lambda index: _lengths(work.items[index])):
            own = list(group)
            at_once = 1 if self._model.runs_alone else self._limits.max_batch_sequences
            for start in range(0, len(own), at_once):
                together = own[start : start + at_once]
                items = [work.items[index] for index in together]
                outputs = run_batch(self._model, items, return_weights=self._return_weights)
                for index, output in zip(together, outputs, strict=True):
                    results[index] = output
        return results


def _lengths(item: Item) -> tuple[int, ...]:
    return tuple(item.sizes.values())


def _ragged(sequences: Sequence[Array]) -> Ragged:
    return Ragged(np.concatenate(sequences), tuple(map(len, sequences)))


def _folder(repository: Path, model: str, version: str) -> Path:
    found = sorted(
        (int(path.name) for path in (repository / model).glob("*") if path.name.isdigit()), reverse=True
    )
    if not found or (version and not (repository / model / version).is_dir()):
        versions = f"; it has {', '.join(map(str, found))}" if found else ""
        raise EnrichError(f"{repository} holds no model {' '.join(filter(None, [model, version]))}{versions}")
    return repository / model / (version or str(found[0]))


def spec_of(model: LoadedModel) -> ModelSpec:
    """What a job must know of a model.

    Raises:
        EnrichError: It makes no vectors of sequences.
    """
    return ModelSpec.from_axes(
        name=model.name,
        version=model.version,
        accepts_text=model.text_encoder is not None,
        inputs=[spec.axes for spec in model.inputs if spec.name != POSITIONS],
        output=model.manifest.graphs[GraphKind.PLAIN].outputs[0].axes,
        parity_error=model.measured_error,
    )
