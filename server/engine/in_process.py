"""The engine for use in the caller's own process: load, submit, close. Needs neither a server nor a queue.

```python
from attention_serving.server.engine.in_process import InProcessModel

model = InProcessModel.load(Path("model_repository"), "multi-head-768x12")
result = model.submit({"query": [np.ones((6, 768), np.float32)]}).result()
model.close()
```

All sequences of a request are known beforehand, so its batches are planned rather than scheduled: sequences
of equal length run together. That avoids padding, and equal requests give bitwise equal results.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.manifest import TensorSpec
from attention_serving.server import machine
from attention_serving.server.engine.contexts import join_tensors, projected_inputs
from attention_serving.server.engine.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    ModelNotReadyError,
    quoted,
)
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import ContextModel, LoadedModel
from attention_serving.server.engine.models.loading import load_model, versions
from attention_serving.server.engine.requests.outputs import finish_embeddings
from attention_serving.server.engine.requests.request import Request, split
from attention_serving.server.engine.requests.validation import tokenize_texts, validate
from attention_serving.server.engine.run.execute import Outputs, run_batch
from attention_serving.server.engine.run.provider import Device, Provider, ProviderError
from attention_serving.server.engine.types import (
    Array,
    Context,
    DecodedRequest,
    EncoderOutputs,
    Ragged,
    Result,
)


class InProcessModel:
    """One loaded model. Its methods may be called from any thread.

    Attributes:
        model: The model.
        inputs: The inputs that a request must contain, without optional ones.
        tokenizer: For models that take text, the file of the tokenizer; otherwise None.
        parallel_runs: How many requests are computed at once.
    """

    def __init__(self, model: LoadedModel, folder: Path, parallel_runs: int, limits: Limits) -> None:
        self.inputs: tuple[TensorSpec, ...] = tuple(
            s for s in model.inputs if s.name not in model.optional_inputs
        )
        self.tokenizer = folder / model.manifest.tokenizer if model.manifest.tokenizer else None
        self.parallel_runs = parallel_runs
        self.model = model
        self._limits = limits
        self._threads = ThreadPoolExecutor(parallel_runs, "in-process")

    @classmethod
    def load(
        cls,
        repository: Path,
        name: str,
        version: str = "",
        *,
        provider: Provider = Provider.CPU,
        parallel_runs: int = 0,
    ) -> Self:
        """Loads a model and replays its golden vectors.

        Args:
            repository: Model repository.
            name: Name of the model.
            version: Version of the model; empty for the highest.
            provider: Execution provider.
            parallel_runs: How many requests to compute at once, each on one core; 0 for the number of
                available cores. Many runs on one core each use a CPU better than one run on all of them.
                Ignored for providers that do not use the cores of the host.

        Raises:
            ModelNotFoundError: The repository does not contain this model or version.
            ModelNotReadyError: The artifact is damaged or misses its tolerance on this machine, or the
                provider is not available.
        """
        existing_versions = versions(repository, name)
        if not existing_versions or (version and version not in existing_versions):
            existing = f"; it has version {', '.join(existing_versions)}" if existing_versions else ""
            name_and_version = f"model {quoted(name)}" + (f" version {quoted(version)}" if version else "")
            raise ModelNotFoundError(f"{repository} does not contain {name_and_version}{existing}")
        on_host = provider.runtime.uses_host_cores
        device = Device(provider, threads=1 if on_host else 0)
        runs = (parallel_runs or machine.available_cores()) if on_host else device.parallel_runs
        folder = repository / name / (version or existing_versions[-1])
        try:
            model = replace(load_model(folder, device), golden=())
        except (ArtifactError, ProviderError) as error:
            raise ModelNotReadyError(str(error)) from error
        return cls(model, folder, runs, provider.runtime.limits)

    def encode(self, texts: Sequence[str], **options: Any) -> tuple[list[Array], tuple[int, ...]]:
        """Encodes texts on the thread of the caller, as a request with them would be encoded.

        Args:
            texts: The texts, at least one.
            **options: Those of texts of a `DecodedRequest`: `prompt`, `truncate` and `input_kind`.

        Returns:
            The token ids (T,) of each text, and the indices of the texts that were cut.

        Raises:
            InvalidRequestError: A text or the prompt is refused; says which and why.
        """
        decoded = DecodedRequest(texts=tuple(texts), **options)
        encoded = tokenize_texts(decoded, self.model, self._limits)
        ids = encoded.inputs[self.inputs[0].name]
        return split(ids.rows, ids.lengths), encoded.truncated

    def submit(
        self,
        inputs: Mapping[str, Sequence[Array]],
        *,
        return_weights: bool = False,
        dimensions: int = 0,
        context: ContextModel | None = None,
        encoder_outputs: EncoderOutputs | None = None,
        input_kind: str = "",
    ) -> Future[Result]:
        """Computes one request on a thread of the model.

        Args:
            inputs: By name of the input, one array (T, ...) for each sequence; of inputs without a
                sequence axis, one without the batch axis, such as a vector (d,).
            return_weights: Whether the result contains `attention_weights`.
            dimensions: For text encoders: number of leading elements of each embedding; 0 for all.
            context: What the queries attend to, in place of keys and values: see `put_context`.
            encoder_outputs: For text encoders: what the result has; None for the outputs of the cheapest
                graph as they are.
            input_kind: The kind of the texts: see `DecodedRequest`.

        Returns:
            A future that resolves with the result, or with an `EngineError` if the request is refused.
        """
        decoded = DecodedRequest(
            return_weights=return_weights,
            dimensions=dimensions,
            encoder_outputs=encoder_outputs,
            input_kind=input_kind,
        )
        model = self.model if context is None else context
        return self._threads.submit(self._compute, model, decoded, inputs)

    def put_context(self, key: Array, value: Array | None = None) -> ContextModel:
        """Projects the rows that many queries are to attend to, on the thread of the caller.

        Args:
            key: (T, d_key); for self-attention modules, rows of the query's width.
            value: (T, d_value), for models that take values apart from keys.

        Raises:
            EngineError: The model has no stored contexts, or the rows are refused.
        """
        positions, projector = np.arange(len(key)), self.model.projector
        rows = {"key": key} if value is None else {"key": key, "value": value}
        inputs = projected_inputs(projector, rows, positions)
        sequences = {name: [array] for name, array in inputs.items()}
        result = self._compute(projector, DecodedRequest(), sequences)
        tensors = join_tensors(positions, None, result.outputs)
        return self.model.with_context(Context(id="", nbytes=0, tensors=tensors, length=len(key)))

    def close(self) -> None:
        """Cancels requests that have not started and returns when the others have ended."""
        self._threads.shutdown(cancel_futures=True)

    def _compute(
        self, model: LoadedModel, decoded: DecodedRequest, inputs: Mapping[str, Sequence[Array]]
    ) -> Result:
        decoded.inputs = {name: _ragged(name, sequences) for name, sequences in inputs.items()}
        validated = validate(decoded, model, self._limits)
        results: list[Outputs] = [{}] * len(validated.sequences)
        for indices in self._batches(validated):
            batch = [validated.sequences[index] for index in indices]
            outputs, _ = run_batch(model, batch[0].plan.graph, batch)
            for index, output in zip(indices, outputs, strict=True):
                results[index] = output
        columns = {name: [outputs[name] for outputs in results] for name in results[0]}
        plan = validated.plan
        return Result(finish_embeddings(columns, plan.dimensions, normalises=plan.normalises))

    def _batches(self, request: Request) -> Iterator[list[int]]:
        """Indices of sequences of equal lengths, in portions that one run may hold."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, sequence in enumerate(request.sequences):
            groups.setdefault(tuple(sequence.sizes.values()), []).append(index)
        for indices in groups.values():
            plan, size = request.sequences[indices[0]].plan, 1
            if not plan.runs_alone:
                limits, rows = self._limits, self._limits.max_batch_rows // plan.computed_rows
                fitting = min(limits.max_batch_sequences, rows, limits.max_batch_bytes // plan.run_bytes)
                size = max(1, fitting)
            yield from (indices[start : start + size] for start in range(0, len(indices), size))


def _ragged(name: str, sequences: Sequence[Array]) -> Ragged:
    try:
        rows = [np.atleast_1d(sequence) for sequence in sequences]  # a scalar is one row
        return Ragged(np.concatenate(rows), tuple(map(len, rows)))
    except ValueError as error:  # there are none, or their rows differ
        raise InvalidRequestError(name, str(error)) from error
