"""The backend that computes in this process, on a model that the engine loads: neither server nor queue."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from attention_client import AttentionResult, Embeddings, ModelInfo, SparseVector
from attention_client._calls.embeddings import OUTPUT_TYPES, as_output_type, encode_embeddings
from attention_client._values import RequestOptions
from attention_client.enrich.backends import BackendRequest, embedding_inputs
from attention_client.enrich.model import JobModel
from attention_client.enrich.options import EnrichOptions, Role
from attention_client.enrich.outcome import EnrichError, RefusedError

from attention_serving.artifact.encoder import CONTEXT_VECTORS, EMBEDDING
from attention_serving.server.api.attention.requests import NAME_BY_ENUM, encoder_outputs, quantisation_range
from attention_serving.server.api.attention.responses import describe
from attention_serving.server.api.tensors import OutputPlaceholder
from attention_serving.server.engine.errors import EngineError, InvalidRequestError
from attention_serving.server.engine.in_process import InProcessModel
from attention_serving.server.engine.run.provider import Provider
from attention_serving.server.engine.types import (
    SPARSE_INDICES,
    SPARSE_VALUES,
    Array,
    EncoderOutputs,
    Result,
)

# Texts that are encoded together, at most.
ENCODED_TOGETHER = 64


class LocalBackend:
    """One model of a repository, loaded in this process."""

    def __init__(
        self, repository: Path, options: EnrichOptions, provider: str, *, version: str = "", parallel: int = 0
    ) -> None:
        """Loads the model and replays its golden vectors.

        Args:
            repository: Model repository.
            options: Options of the job, which name the model.
            provider: cpu or cuda.
            version: Version of the model in place of that of the options.
            parallel: How many requests to compute at once, each on one core; 0 for the number of available
                cores.

        Raises:
            EnrichError: The model does not exist or cannot be used here.
        """
        try:
            self._model = InProcessModel.load(
                repository,
                options.model,
                version or options.version,
                provider=Provider(provider),
                parallel_runs=parallel,
            )
        except EngineError as error:
            raise EnrichError(error.message) from error
        # The messages of the server and of the client have the same fields.
        described: Any = describe(self._model.model)
        self.model, memory = JobModel.read(ModelInfo.from_proto(described), options)
        try:
            self._context = self._model.put_context(*memory) if memory else None
        except EngineError as error:
            raise EnrichError(f"the context cannot be used: {error.message}") from error
        self.tokenizer = self._model.tokenizer
        self.concurrency = self._model.parallel_runs
        self._options = options

    def encode_texts(self, texts: Sequence[str]) -> tuple[Sequence[Any], Sequence[int]]:
        """As of Backend: the token ids of the texts. Halves by themselves show which text is refused."""
        options = self._options
        try:
            if 0 < len(texts) <= ENCODED_TOGETHER:
                prompt, kind = options.prompt, options.input_kind or ""
                return self._model.encode(texts, prompt=prompt, truncate=options.truncate, input_kind=kind)
        except InvalidRequestError as error:
            if len(texts) == 1:
                return [RefusedError(error.message, error.reason)], ()
        if not texts:
            return [], ()
        half = len(texts) // 2
        (first, cut), (second, cut_later) = (self.encode_texts(part) for part in (texts[:half], texts[half:]))
        return [*first, *second], [*cut, *(half + index for index in cut_later)]

    def count_tokens(self, text: str, *, prompt: str | None) -> int:
        """As of Backend."""
        try:
            kind = self._options.input_kind if prompt is None else None
            (ids,), _ = self._model.encode([text], prompt=prompt, input_kind=kind or "")
        except EngineError as error:
            raise EnrichError(error.message) from error
        return len(ids)

    def submit(self, request: BackendRequest) -> Callable[[], AttentionResult[Any]]:
        """As of Backend. Texts are encoded before."""
        sequences = [request[role] for role in Role if role in request]
        inputs = dict(zip([spec.name for spec in self._model.inputs], sequences, strict=False))
        future = self._model.submit(
            inputs,
            context=self._context,
            return_weights=self._options.weights,
            dimensions=self._options.dimensions or 0,
            encoder_outputs=self._encoder_outputs,
            input_kind=self._options.input_kind or "",
        )
        return partial(self._result, future)

    @cached_property
    def _encoder_outputs(self) -> EncoderOutputs | None:
        """What results of a text encoder have: what a server computes for the request of a client."""
        if self._model.model.encoder is None:
            return None
        inputs, options = embedding_inputs(self._options, ["a"]), RequestOptions(model=self.model.name)
        message: Any = encode_embeddings(options, inputs).requests[0]
        return encoder_outputs(message, self._model.model)

    def _result(self, future: "Future[Result]") -> AttentionResult[Any]:
        """A result or an error of the engine in the terms of a job."""
        try:
            outputs = future.result().outputs
            vectors = self._read(outputs)
        except InvalidRequestError as error:
            raise RefusedError(error.message, error.reason) from error
        except EngineError as error:
            raise EnrichError(error.message) from error
        weights = None
        if self._options.weights and (output := self._model.model.weights_output) is not None:
            weights = [array.reshape(-1, *array.shape[-2:]) for array in outputs[output.name]]
        return AttentionResult(
            vectors, weights, self.model.name, self.model.version, model_digest=self.model.digest
        )

    def _read(self, outputs: Mapping[str, list[Array]]) -> Any:
        if self._options.outputs is None:
            return self._in_output_type(next(iter(outputs.values())))
        dense, indices = outputs.get(EMBEDDING), outputs.get(SPARSE_INDICES)
        return Embeddings(
            dense=None if dense is None else self._in_output_type(dense),
            sparse=None if indices is None else list(map(SparseVector, indices, outputs[SPARSE_VALUES])),
            token_vectors=outputs.get(CONTEXT_VECTORS),
        )

    def _in_output_type(self, vectors: list[Array]) -> list[Array]:
        """The vectors in the type of the job, as a server and the client make it."""
        output_type = self._options.output_type or "float32"
        data_type: Any = OUTPUT_TYPES[output_type]
        if data_type is None:
            return vectors
        name = NAME_BY_ENUM[data_type]
        largest = quantisation_range(self._model.model, name, self._options.dimensions or 0)
        parts = OutputPlaceholder(EMBEDDING, name, largest=largest).parts(vectors)
        return [as_output_type(part, output_type) for part in parts]

    def close(self) -> None:
        """Cancels requests that have not started."""
        self._model.close()
