"""A batch of rows that is being computed: submitted, and collected as new columns."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from attention_client.enrich.backend import Array, Backend, BackendRequest, BackendResult, Role
from attention_client.enrich.errors import EnrichError, RefusedError
from attention_client.enrich.inputs import INVALID_CELL, BatchInputs
from attention_client.enrich.layout import BatchResults, enriched
from attention_client.enrich.options import JobOptions
from attention_client.enrich.packing import pack, sizes
from attention_client.enrich.pooling import POOLS, Pool
from attention_client.enrich.summary import Refusal

# Reason of a text with too many tokens.
LIMIT_EXCEEDED = "LIMIT_EXCEEDED"


@dataclass(frozen=True)
class EnrichedBatch:
    """A batch with its new columns.

    Attributes:
        output: The rows of the result, made when they are taken.
        rows: Number of rows of the table.
        tokens: Query and key rows that were computed.
        nulls: Rows without a result because there is nothing to compute.
        passages: Passages that were computed; 0 if texts are not cut.
        truncated: Rows of which the text was cut to the tokens that the model takes.
        refusals: Rows without a result because they were refused.
    """

    output: Iterable[pa.RecordBatch]
    rows: int
    tokens: int
    nulls: int
    passages: int
    truncated: int
    refusals: Sequence[Refusal]


class PendingBatch:
    """A batch whose requests are submitted and not yet collected."""

    def __init__(self, inputs: BatchInputs, schema: pa.Schema, backend: Backend, options: JobOptions) -> None:
        """Submits the requests of a batch.

        Args:
            inputs: The rows and what they give to compute.
            schema: Columns of the result.
            backend: Computes the requests.
            options: Options of the job.
        """
        self._inputs = inputs
        self._schema = schema
        self._backend = backend
        self._options = options
        self._pooled = backend.model.pooled or options.pool is not Pool.NONE
        self._tokens = 0
        self._refusals: dict[int, Refusal] = {}
        self._truncated = set(inputs.truncated)
        self._vectors: list[Array | None] = [None] * len(inputs.rows)
        self._weights: list[Array | None] = [None] * len(inputs.rows)
        for row, error in inputs.refused.items():
            self._refuse(row, error.reason, str(error))
        # Lengths of the sequences of each input; -1 if there is none.
        self._lengths = {role: sizes(values) for role, values in inputs.values.items()}
        groups = pack(self._to_compute(), self._lengths, backend.model, weights=options.weights)
        requests = [(sequences, self._request(sequences)) for sequences in groups]
        self._submitted = [(sequences, request, backend.submit(request)) for sequences, request in requests]

    def _to_compute(self) -> Array:
        """Sequences with something to compute: null gives null, an empty query no context vectors."""
        query, *others = self._lengths.values()
        given = np.all([lengths >= 0 for lengths in self._lengths.values()], axis=0)
        for lengths in others:
            for row in np.flatnonzero(given & (lengths == 0)).tolist():
                self._refuse(row, INVALID_CELL, "the key or value is empty; attention needs one row or more")
        given &= ~np.isin(self._inputs.rows, list(self._refusals))
        if not self._backend.model.accepts_text:
            if not self._pooled:
                for row in np.flatnonzero(given & (query == 0)).tolist():
                    self._vectors[row] = np.empty((0, self._backend.model.output_width), np.float32)
            given &= query > 0
        return np.flatnonzero(given)

    def _request(self, sequences: list[int]) -> BackendRequest:
        inputs = {
            role: [values[index] for index in sequences] for role, values in self._inputs.values.items()
        }
        return BackendRequest(inputs)

    def finish(self) -> EnrichedBatch:
        """Waits for the results.

        Raises:
            EnrichError: The job cannot continue, or a row is refused and the options say to fail.
        """
        for sequences, request, future in self._submitted:
            self._collect(sequences, request, future)
        if self._refusals and not self._options.skip_refused:
            first = min(self._refusals.values(), key=lambda refusal: refusal.row)
            raise EnrichError(
                f"row {first.row} is refused: {first.message}; --on-error skip (on_error='skip') leaves such "
                "rows out"
            )
        inputs = self._inputs
        without = {
            row for row, found in zip(inputs.rows.tolist(), self._vectors, strict=True) if found is None
        }
        results = BatchResults(self._vectors, self._weights, frozenset(self._refusals), pooled=self._pooled)
        return EnrichedBatch(
            output=enriched(inputs, results, self._schema, self._backend.model, self._options),
            rows=inputs.batch.rows.num_rows,
            tokens=self._tokens,
            nulls=len(without - self._refusals.keys()),
            passages=0 if inputs.passages is None else sum(found is not None for found in self._vectors),
            truncated=len(self._truncated - self._refusals.keys()),
            refusals=[self._refusals[row] for row in sorted(self._refusals)],
        )

    def _collect(self, sequences: list[int], request: BackendRequest, future: Future[BackendResult]) -> None:
        try:
            result = future.result()
        except RefusedError as error:
            if len(sequences) == 1:
                self._refuse(int(self._inputs.rows[sequences[0]]), error.reason, str(error))
            else:
                self._submit_each(sequences, request)
            return
        for index, vectors in zip(sequences, result.context_vectors, strict=True):
            self._vectors[index] = self._pool(vectors)
        if result.attention_weights is not None:
            for index, weights in zip(sequences, result.attention_weights, strict=True):
                self._weights[index] = weights
        self._truncated.update(int(self._inputs.rows[sequences[position]]) for position in result.truncated)
        self._tokens += self._count_tokens(sequences, result)

    def _submit_each(self, sequences: list[int], request: BackendRequest) -> None:
        """Finds the sequences for which a request was refused: submits each by itself."""
        singles = [(index, request.only(position)) for position, index in enumerate(sequences)]
        for index, single, future in [(index, one, self._backend.submit(one)) for index, one in singles]:
            self._collect([index], single, future)

    def _pool(self, vectors: Array) -> Array:
        if self._backend.model.pooled:
            return vectors.reshape(self._backend.model.output_width)
        return POOLS[self._options.pool](vectors)

    def _count_tokens(self, sequences: list[int], result: BackendResult) -> int:
        """Query and key rows. A text of unknown length counts one token for each of its vectors."""
        if result.token_counts:
            return sum(result.token_counts)
        if isinstance(self._inputs.values[Role.QUERY][sequences[0]], str):
            return sum(vectors.size // self._backend.model.output_width for vectors in result.context_vectors)
        counted = (lengths for role, lengths in self._lengths.items() if role is not Role.VALUE)
        return sum(int(lengths[sequences].sum()) for lengths in counted)

    def _refuse(self, row: int, reason: str, message: str) -> None:
        if reason == LIMIT_EXCEEDED and self._backend.model.encoder and not self._options.truncate:
            message += "; --truncate (truncate=True) cuts texts to the tokens that the model takes"
        self._refusals.setdefault(row, Refusal(self._inputs.batch.first + row, reason, message))
