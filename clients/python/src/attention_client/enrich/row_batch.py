"""One window of rows: its sequences are sent off together, packed by length, and come back as columns."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from attention_client._values import Array
from attention_client.enrich.backend import Backend, BackendRequest, BackendResult, Role
from attention_client.enrich.columns import (
    Cells,
    pooled_column,
    read_ids,
    read_texts,
    read_vectors,
    vectors_column,
    weights_column,
)
from attention_client.enrich.errors import EnrichError, RefusedError
from attention_client.enrich.plan import Options
from attention_client.enrich.pooling import POOLS, Pool
from attention_client.enrich.tables import ROW_BATCH_BYTES

# A request holds at most so many sequences and, of several, so many bytes of input or of result.
REQUEST_SEQUENCES = 64
REQUEST_BYTES = 1 << 20
# A full row batch makes at least so many requests.
ROW_BATCH_REQUESTS = ROW_BATCH_BYTES // REQUEST_BYTES
# Of attention weights at most so many pairs of rows: 16 MiB for 16 heads.
REQUEST_PAIRS = 1 << 18
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Refusal:
    """A row that has no result although its cell is not null.

    Attributes:
        row: Its number in its file.
        reason: Short and stable, for programs.
        message: For people.
    """

    row: int
    reason: str
    message: str


@dataclass(frozen=True)
class Done:
    """A window with its new columns."""

    batch: pa.RecordBatch
    tokens: int
    nulls: int
    refusals: Sequence[Refusal]


class Window:
    """Rows under way."""

    def __init__(
        self, first: int, batch: pa.RecordBatch, schema: pa.Schema, backend: Backend, options: Options
    ) -> None:
        """Sends the sequences off.

        Args:
            first: Number of the first row in its file.
            batch: The rows.
            schema: Theirs, and the new columns.
            backend: Computes them.
            options: What is asked of them.

        Raises:
            EnrichError: A column is of a type that the model does not take.
        """
        self._first = first
        self._batch = batch
        self._schema = schema
        self._backend = backend
        self._options = options
        self._tokens = 0
        self._refusals: dict[int, Refusal] = {}
        self._vectors: list[Array | None] = [None] * batch.num_rows
        self._weights: list[Array | None] = [None] * batch.num_rows
        cells = {role: self._read(role, column) for role, column in options.columns.items()}
        self._values = {role: read.values for role, read in cells.items()}
        # By role the rows of each sequence, -1 where there is none.
        self._lengths = {
            role: np.array([-1 if value is None else len(value) for value in values], np.int64)
            for role, values in self._values.items()
        }
        for role, read in cells.items():
            for row, message in read.refused.items():
                self._refuse(row, "INVALID_CELL", f"{options.columns[role]}: {message}")
        self._asked = [(rows, request, backend.submit(request)) for rows, request in self._requests()]

    def _read(self, role: Role, column: str) -> Cells:
        model, cells = self._backend.model, self._batch.column(column)
        if pa.types.is_null(cells.type):
            return Cells([None] * len(cells), {})
        try:
            if model.accepts_text:
                return read_texts(cells)
            width = model.input_widths[role]
            return read_ids(cells) if width is None else read_vectors(cells, width)
        except EnrichError as error:
            raise EnrichError(f"column {column!r} {error}") from error

    def _requests(self) -> Iterator[tuple[list[int], BackendRequest]]:
        """Rows of similar length, and the request that asks for them."""
        asked = self._choose()
        lengths = [lengths[asked] for lengths in self._lengths.values()]
        query, key = lengths[0], lengths[-1]
        by_length = np.lexsort((key, query))
        rows, start = asked[by_length].tolist(), 0
        for index, most in enumerate(self._most(query, key)[by_length].tolist()):
            if index - start >= max(most, 1):
                yield rows[start:index], self._request(rows[start:index])
                start = index
        if rows:
            yield rows[start:], self._request(rows[start:])

    def _choose(self) -> Array:
        """The rows that have something to compute: null gives null, and no rows give no context vectors."""
        query, *others = self._lengths.values()
        given = np.all([lengths >= 0 for lengths in self._lengths.values()], axis=0)
        for lengths in others:
            for row in np.flatnonzero(given & (lengths == 0)).tolist():
                self._refuse(row, "INVALID_CELL", "the key or value is empty: there is nothing to attend to")
        given[list(self._refusals)] = False
        if not self._backend.model.accepts_text:
            if self._options.pool is Pool.NONE and not self._backend.model.pooled:
                for row in np.flatnonzero(given & (query == 0)).tolist():
                    self._vectors[row] = np.empty((0, self._backend.model.output_width), np.float32)
            given &= query > 0
        return np.flatnonzero(given)

    def _most(self, query: Array, key: Array) -> Array:
        """How many sequences of such lengths a request may hold."""
        model = self._backend.model
        width = max(model.output_width, *(width or 1 for width in model.input_widths.values()))
        longest = np.maximum(np.maximum(query, key), 1)
        most: Array = np.minimum(REQUEST_SEQUENCES, REQUEST_BYTES // (longest * width * FLOAT_BYTES))
        if self._options.weights_column:
            most = np.minimum(most, REQUEST_PAIRS // np.maximum(query * key, 1))
        return most

    def _request(self, rows: list[int]) -> BackendRequest:
        return BackendRequest({role: [column[row] for row in rows] for role, column in self._values.items()})

    def finish(self) -> Done:
        """Waits for the results.

        Raises:
            EnrichError: The job cannot go on, or a row is refused and the options do not say to skip it.
        """
        for rows, request, future in self._asked:
            self._take(rows, request, future)
        if self._refusals and not self._options.skip_refused:
            first = min(self._refusals.values(), key=lambda refusal: refusal.row)
            raise EnrichError(f"row {first.row} is refused: {first.message}; --on-error skip goes on")
        return Done(
            batch=self._enriched(),
            tokens=self._tokens,
            nulls=sum(vectors is None for vectors in self._vectors) - len(self._refusals),
            refusals=[self._refusals[row] for row in sorted(self._refusals)],
        )

    def _take(self, rows: list[int], request: BackendRequest, future: Future[BackendResult]) -> None:
        try:
            answer = future.result()
        except RefusedError as error:
            if len(rows) == 1:
                self._refuse(rows[0], error.reason, str(error))
                return
            # One of them is the culprit: each is asked for by itself.
            singles = [(row, request.only(at)) for at, row in enumerate(rows)]
            for row, single, again in [(row, one, self._backend.submit(one)) for row, one in singles]:
                self._take([row], single, again)
            return
        pool = POOLS[self._options.pool]
        for row, vectors in zip(rows, answer.context_vectors, strict=True):
            self._vectors[row] = vectors.reshape(-1) if self._backend.model.pooled else pool(vectors)
        if answer.attention_weights is not None:
            for row, weights in zip(rows, answer.attention_weights, strict=True):
                self._weights[row] = weights
        self._tokens += self._rows_of(rows, answer)

    def _rows_of(self, rows: list[int], answer: BackendResult) -> int:
        """Query and key rows of sequences; a text has as many as it has context vectors."""
        if self._backend.model.accepts_text:
            return sum(map(len, answer.context_vectors))
        return sum(
            int(lengths[rows].sum()) for role, lengths in self._lengths.items() if role is not Role.VALUE
        )

    def _refuse(self, row: int, reason: str, message: str) -> None:
        self._refusals.setdefault(row, Refusal(self._first + row, reason, message))

    def _enriched(self) -> pa.RecordBatch:
        width = self._backend.model.output_width
        pooled = self._backend.model.pooled or self._options.pool is not Pool.NONE
        to_column = pooled_column if pooled else vectors_column
        columns: list[Any] = [*self._batch.columns, to_column(self._vectors, width)]
        if self._options.weights_column:
            columns.append(weights_column(self._weights))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)
