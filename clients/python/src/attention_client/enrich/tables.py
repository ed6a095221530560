"""Tables as batches of rows of bounded size: what every format reads and writes."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import pyarrow as pa

# The rows of a batch are computed, held in memory and written together.
BATCH_ROWS = 1024
BATCH_BYTES = 4 << 20


class RowBatch(NamedTuple):
    """Consecutive rows of a table.

    Attributes:
        first: Number of the first row in its table.
        rows: The rows.
    """

    first: int
    rows: pa.RecordBatch


class TableReader(Protocol):
    """A table that is open for reading.

    Attributes:
        schema: Its columns.
        rows: Number of its rows.
    """

    schema: pa.Schema
    rows: int

    def batches(self, start: int, stop: int) -> Iterator[RowBatch]:
        """The rows from `start` up to, but not including, `stop`.

        Where one batch ends and the next begins depends on the table, not on `start`.
        """

    def close(self) -> None:
        """Closes the table."""


class TableWriter(Protocol):
    """Writes rows of one schema to an open file."""

    def write(self, rows: pa.RecordBatch) -> None:
        """Appends rows."""

    def close(self) -> None:
        """Writes buffered rows and the end of the file; leaves the file open."""


class ScannedTable:
    """Rows in memory, or rows that another library reads from the beginning each time."""

    def __init__(self, schema: pa.Schema, rows: int, scan: Callable[[], Iterable[pa.RecordBatch]]) -> None:
        self.schema = schema
        self.rows = rows
        self._scan = scan

    def batches(self, start: int, stop: int) -> Iterator[RowBatch]:
        """See TableReader."""
        yield from clip(split(0, self._scan()), start, stop)

    def close(self) -> None:
        """Does nothing: the rows belong to the caller."""


def split(first: int, record_batches: Iterable[pa.RecordBatch]) -> Iterator[RowBatch]:
    """Splits consecutive record batches, which begin at row `first`, into batches of bounded size."""
    for record_batch in record_batches:
        rows = rows_per_batch(record_batch.num_rows, record_batch.nbytes)
        for start in range(0, record_batch.num_rows, rows):
            yield RowBatch(first + start, record_batch.slice(start, rows))
        first += record_batch.num_rows


def clip(batches: Iterable[RowBatch], start: int, stop: int) -> Iterator[RowBatch]:
    """Drops the rows before `start`, and those from `stop` on."""
    for first, rows in batches:
        if first >= stop:
            return
        skipped = max(start - first, 0)
        kept = min(stop - first, rows.num_rows) - skipped
        if kept > 0:
            yield RowBatch(first + skipped, rows.slice(skipped, kept))


def rows_per_batch(rows: int, size: int) -> int:
    """How many rows make a batch, if `rows` of them hold `size` bytes; at least one."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))
