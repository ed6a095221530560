"""A batch of rows that is being computed: read, submitted, and collected as new columns."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from attention_client.enrich.backend import Array, Backend, BackendRequest, BackendResult, Role
from attention_client.enrich.cells import Cells, read_ids, read_texts, read_vectors
from attention_client.enrich.columns import pooled_column, vectors_column, weights_column
from attention_client.enrich.errors import EnrichError, RefusedError
from attention_client.enrich.options import JobOptions
from attention_client.enrich.packing import pack
from attention_client.enrich.pooling import POOLS, Pool
from attention_client.enrich.summary import Refusal
from attention_client.enrich.tables import RowBatch

# Reason of a row that was refused before it was sent.
INVALID_CELL = "INVALID_CELL"


@dataclass(frozen=True)
class EnrichedBatch:
    """A batch with its new columns.

    Attributes:
        rows: The rows.
        tokens: Query and key rows that were computed.
        nulls: Rows without a result because there is nothing to compute.
        refusals: Rows without a result because they were refused.
    """

    rows: pa.RecordBatch
    tokens: int
    nulls: int
    refusals: Sequence[Refusal]


class PendingBatch:
    """A batch whose requests are submitted and not yet collected."""

    def __init__(self, batch: RowBatch, schema: pa.Schema, backend: Backend, options: JobOptions) -> None:
        """Reads the cells and submits their requests.

        Args:
            batch: The rows.
            schema: Their columns, and the new columns.
            backend: Computes the requests.
            options: Options of the job.
        """
        self._batch = batch
        self._schema = schema
        self._backend = backend
        self._options = options
        self._pooled = backend.model.pooled or options.pool is not Pool.NONE
        self._tokens = 0
        self._refusals: dict[int, Refusal] = {}
        self._vectors: list[Array | None] = [None] * batch.rows.num_rows
        self._weights: list[Array | None] = [None] * batch.rows.num_rows
        self._values = {role: self._read(role, column) for role, column in options.columns.items()}
        # Lengths of the sequences of each input; -1 if there is none.
        self._lengths = {
            role: np.array([-1 if value is None else len(value) for value in values], np.int64)
            for role, values in self._values.items()
        }
        groups = pack(self._rows_to_compute(), self._lengths, backend.model, weights=options.weights)
        requests = [(rows, self._request(rows)) for rows in groups]
        self._submitted = [(rows, request, backend.submit(request)) for rows, request in requests]

    def _read(self, role: Role, column: str) -> list[Any]:
        cells = self._cells(role, self._batch.rows.column(column))
        for row, message in cells.refused.items():
            self._refuse(row, INVALID_CELL, f"column {column!r}: {message}")
        return cells.values

    def _cells(self, role: Role, column: pa.Array) -> Cells:
        model = self._backend.model
        if pa.types.is_null(column.type):
            return Cells([None] * len(column), {})
        if model.accepts_text:
            return read_texts(column)
        width = model.input_widths[role]
        return read_ids(column) if width is None else read_vectors(column, width)

    def _rows_to_compute(self) -> Array:
        """Rows with something to compute: null gives null, and an empty query gives no context vectors."""
        query, *others = self._lengths.values()
        given = np.all([lengths >= 0 for lengths in self._lengths.values()], axis=0)
        for lengths in others:
            for row in np.flatnonzero(given & (lengths == 0)).tolist():
                self._refuse(row, INVALID_CELL, "the key or value is empty; attention needs one row or more")
        given[list(self._refusals)] = False
        if not self._backend.model.accepts_text:
            if not self._pooled:
                for row in np.flatnonzero(given & (query == 0)).tolist():
                    self._vectors[row] = np.empty((0, self._backend.model.output_width), np.float32)
            given &= query > 0
        return np.flatnonzero(given)

    def _request(self, rows: list[int]) -> BackendRequest:
        return BackendRequest({role: [values[row] for row in rows] for role, values in self._values.items()})

    def finish(self) -> EnrichedBatch:
        """Waits for the results.

        Raises:
            EnrichError: The job cannot continue, or a row is refused and the options say to fail.
        """
        for rows, request, future in self._submitted:
            self._collect(rows, request, future)
        if self._refusals and not self._options.skip_refused:
            first = min(self._refusals.values(), key=lambda refusal: refusal.row)
            raise EnrichError(
                f"row {first.row} is refused: {first.message}; --on-error skip (on_error='skip') leaves such "
                "rows out"
            )
        return EnrichedBatch(
            rows=self._enriched(),
            tokens=self._tokens,
            nulls=sum(vectors is None for vectors in self._vectors) - len(self._refusals),
            refusals=[self._refusals[row] for row in sorted(self._refusals)],
        )

    def _collect(self, rows: list[int], request: BackendRequest, future: Future[BackendResult]) -> None:
        try:
            result = future.result()
        except RefusedError as error:
            if len(rows) == 1:
                self._refuse(rows[0], error.reason, str(error))
            else:
                self._submit_each(rows, request)
            return
        for row, vectors in zip(rows, result.context_vectors, strict=True):
            self._vectors[row] = self._pool(vectors)
        if result.attention_weights is not None:
            for row, weights in zip(rows, result.attention_weights, strict=True):
                self._weights[row] = weights
        self._tokens += self._count_tokens(rows, result)

    def _submit_each(self, rows: list[int], request: BackendRequest) -> None:
        """Finds the rows for which a request was refused: submits each row by itself."""
        singles = [(row, request.only(index)) for index, row in enumerate(rows)]
        for row, single, future in [(row, one, self._backend.submit(one)) for row, one in singles]:
            self._collect([row], single, future)

    def _pool(self, vectors: Array) -> Array:
        if self._backend.model.pooled:
            return vectors.reshape(self._backend.model.output_width)
        return POOLS[self._options.pool](vectors)

    def _count_tokens(self, rows: list[int], result: BackendResult) -> int:
        """Query and key rows. A text has as many tokens as context vectors; one if the model pools."""
        model = self._backend.model
        if model.accepts_text:
            return sum(vectors.size // model.output_width for vectors in result.context_vectors)
        return sum(
            int(lengths[rows].sum()) for role, lengths in self._lengths.items() if role is not Role.VALUE
        )

    def _refuse(self, row: int, reason: str, message: str) -> None:
        self._refusals.setdefault(row, Refusal(self._batch.first + row, reason, message))

    def _enriched(self) -> pa.RecordBatch:
        to_column = pooled_column if self._pooled else vectors_column
        columns: list[Any] = [
            *self._batch.rows.columns,
            to_column(self._vectors, self._backend.model.output_width),
        ]
        if self._options.weights_column:
            columns.append(weights_column(self._weights))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)
