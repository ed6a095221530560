"""The backend that computes in this process, on a model that the engine loads: neither server nor queue."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from attention_client._embeddings import EmbedOptions
from attention_client.enrich.backend import (
    Array,
    BackendRequest,
    BackendResult,
    EncodedTexts,
    EncoderSpec,
    ModelSpec,
    Role,
)
from attention_client.enrich.errors import EnrichError, RefusedError

from attention_serving.server.engine.errors import EngineError, InvalidRequestError
from attention_serving.server.engine.in_process import InProcessModel
from attention_serving.server.engine.run.provider import Provider
from attention_serving.server.engine.types import Result

NO_OPTIONS = EmbedOptions()
# Texts of which one that is refused makes the others be encoded one by one.
ENCODED_TOGETHER = 64


class LocalBackend:
    """One model of a repository, loaded in this process."""

    def __init__(
        self,
        repository: Path,
        model: str,
        version: str = "",
        *,
        return_weights: bool = False,
        embed: EmbedOptions = NO_OPTIONS,
        provider: str = "cpu",
        parallel: int = 0,
    ) -> None:
        """Loads the model and replays its golden vectors.

        Args:
            repository: Model repository.
            model: Name of the model.
            version: Version of the model; empty for the highest.
            return_weights: Whether to return the attention weights too.
            embed: Options of text encoders.
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
        self.model = _spec_of(self._model).shortened(embed.dimensions)
        self.tokenizer = self._model.tokenizer
        self._embed = embed
        self.concurrency = self._model.parallel_runs
        self._return_weights = return_weights

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """As of Backend: the token ids of the texts."""
        values: list[Any] = []
        refused: dict[int, RefusedError] = {}
        truncated: list[int] = []
        for start in range(0, len(texts), ENCODED_TOGETHER):
            part = texts[start : start + ENCODED_TOGETHER]
            try:
                found: Sequence[Any] = self._encode(part)
            except RefusedError:
                found = [self._encode_one(text) for text in part]
            for index, encoded in enumerate(found, start):
                if isinstance(encoded, RefusedError):
                    refused[index] = encoded
                    values.append(None)
                    continue
                ids, is_cut = encoded
                values.append(ids)
                truncated += [index] if is_cut else []
        return EncodedTexts(values, refused, truncated)

    def _encode(self, texts: Sequence[str]) -> list[tuple[Array, bool]]:
        """The token ids of each text, and whether it was cut."""
        try:
            ids, truncated = self._model.encode(
                texts, prompt=self._embed.prompt, truncate=self._embed.truncate
            )
        except InvalidRequestError as error:
            raise RefusedError(error.message, error.reason) from error
        return [(own, index in truncated) for index, own in enumerate(ids)]

    def _encode_one(self, text: str) -> tuple[Array, bool] | RefusedError:
        try:
            return self._encode([text])[0]
        except RefusedError as error:
            return error

    def count_tokens(self, text: str, *, prompt: str | None) -> int:
        """As of Backend."""
        try:
            (ids,), _ = self._model.encode([text], prompt=prompt)
        except EngineError as error:
            raise EnrichError(error.message) from error
        return len(ids)

    def submit(self, request: BackendRequest) -> "Future[BackendResult]":
        """As of Backend. Texts are encoded before."""
        sequences = [request.inputs[role] for role in Role if role in request.inputs]
        inputs = dict(zip([spec.name for spec in self._model.inputs], sequences, strict=False))
        future = self._model.submit(
            inputs, return_weights=self._return_weights, dimensions=self._embed.dimensions or 0
        )
        result: Future[BackendResult] = Future()
        future.add_done_callback(lambda done: _resolve(result, done))
        return result

    def close(self) -> None:
        """Cancels requests that have not started."""
        self._model.close()


def _spec_of(model: InProcessModel) -> ModelSpec:
    encoder = None
    if (facts := model.encoder) is not None:
        encoder = EncoderSpec(
            prompts=tuple(facts.prompts), dimensions=facts.dimensions, max_tokens=model.max_tokens
        )
    return ModelSpec.from_axes(
        name=model.name,
        version=model.version,
        accepts_text=model.takes_text,
        inputs=[spec.axes for spec in model.inputs],
        output=model.output.axes,
        parity_error=model.measured_error,
        encoder=encoder,
    )


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
