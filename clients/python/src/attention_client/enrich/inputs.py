"""What a batch of rows gives to compute: its cells, read and, for texts, encoded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from attention_client.enrich.backend import Array, Backend, Role
from attention_client.enrich.cells import Cells, read_ids, read_vectors
from attention_client.enrich.errors import RefusedError
from attention_client.enrich.options import JobOptions
from attention_client.enrich.passages import Passage
from attention_client.enrich.tables import RowBatch
from attention_client.enrich.texts import TextReader

# Reason of a row that was refused before it was sent.
INVALID_CELL = "INVALID_CELL"


@dataclass(frozen=True, eq=False)
class BatchInputs:
    """The sequences of a batch. Without passages there is one for each row.

    Attributes:
        batch: The rows.
        values: For each input of the model one value for each of the S sequences; None if there is nothing to
            compute.
        rows: Row of each sequence, ascending integers (S,); each row has one sequence or more.
        passages: For each sequence its passage; None if texts are not cut.
        refused: The reason for each row that is refused already.
        truncated: Rows of which the text was cut.
    """

    batch: RowBatch
    values: Mapping[Role, Sequence[Any]]
    rows: Array
    passages: Sequence[Passage | None] | None
    refused: Mapping[int, RefusedError]
    truncated: frozenset[int]


class InputReader:
    """Reads batches."""

    def __init__(self, backend: Backend, options: JobOptions) -> None:
        """Prepares for a job.

        Raises:
            EnrichError: Texts cannot be cut into passages as the options ask for.
        """
        self._model = backend.model
        self._columns = options.columns
        self._texts = (
            TextReader(backend, options, invalid=INVALID_CELL) if backend.model.accepts_text else None
        )

    def read(self, batch: RowBatch) -> BatchInputs:
        """The sequences of a batch."""
        if self._texts is None:
            return self._read_numbers(batch)
        texts = self._texts.read(batch.rows)
        rows = np.array(texts.rows, np.int64)
        values = {Role.QUERY: texts.values}
        return BatchInputs(batch, values, rows, texts.passages, texts.refused, texts.truncated)

    def _read_numbers(self, batch: RowBatch) -> BatchInputs:
        values: dict[Role, Sequence[Any]] = {}
        refused: dict[int, RefusedError] = {}
        for role, name in self._columns.items():
            cells = self._cells(role, batch.rows.column(name))
            values[role] = cells.values
            for row, message in cells.refused.items():
                refused.setdefault(row, RefusedError(f"column {name!r}: {message}", INVALID_CELL))
        return BatchInputs(batch, values, np.arange(batch.rows.num_rows), None, refused, frozenset())

    def _cells(self, role: Role, column: pa.Array) -> Cells:
        if pa.types.is_null(column.type):
            return Cells([None] * len(column), {})
        width = self._model.input_widths[role]
        return read_ids(column) if width is None else read_vectors(column, width)
