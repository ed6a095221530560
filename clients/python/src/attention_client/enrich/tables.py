"""Files of rows, read and written in chunks of bounded size: changes with the formats."""

import posixpath
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from attention_client.enrich.errors import EnrichError
from attention_client.enrich.storage import Location

PARQUET = ("parquet", "pq")
ARROW = ("arrow", "feather", "ipc")
# A row's number in its file, and the batch of rows that begins with it.
Window = tuple[int, pa.RecordBatch]
# A window of rows is computed, held and written together.
ROW_BATCH_ROWS = 1024
ROW_BATCH_BYTES = 4 << 20
# Rows of an output file that are compressed together.
GROUP_ROWS = 1 << 16
GROUP_BYTES = 32 << 20


class TableFile(Protocol):
    """A file of rows, open for reading."""

    schema: pa.Schema
    rows: int

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """The rows from `start` to `stop`. Where windows end depends on the file, not on where they start."""

    def close(self) -> None:
        """Closes the file."""


class TableWriter(Protocol):
    """Writes rows of one schema to an open file."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends rows."""

    def close(self) -> None:
        """Writes what is left."""


def is_table(name: str) -> bool:
    """Whether a file's name says that it is one of those that are read."""
    return _suffix(name) in (*PARQUET, *ARROW)


def open_table(location: Location) -> TableFile:
    """Opens a file by what its name says that it is.

    Raises:
        EnrichError: It is neither Parquet nor an Arrow IPC file, or is damaged.
    """
    try:
        return ParquetTable(location) if _suffix(location.path) in PARQUET else ArrowTable(location)
    except (pa.ArrowException, OSError) as error:
        raise EnrichError(f"{location}: {error}") from error


def open_writer(name: str, file: pa.NativeFile, schema: pa.Schema) -> TableWriter:
    """Opens a writer of the format that a name says."""
    return ParquetOut(file, schema) if _suffix(name) in PARQUET else ArrowOut(file, schema)


def _suffix(name: str) -> str:
    return posixpath.splitext(name)[1].removeprefix(".").lower()


class ParquetTable:
    """A Parquet file. Its rows are decoded as they are asked for, a window at a time."""

    def __init__(self, location: Location) -> None:
        self._file = pq.ParquetFile(location.open(), pre_buffer=False, buffer_size=1 << 20)
        self.schema = self._file.schema_arrow
        self.rows = self._file.metadata.num_rows

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """As of TableFile. Rows of a group before `start` are decoded and dropped."""
        metadata = self._file.metadata
        end = 0
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            first, end = end, end + group.num_rows
            if first < stop and start < end:
                rows = _window_rows(group.num_rows, group.total_byte_size)
                batches = self._file.iter_batches(rows, row_groups=[index], use_threads=False)
                yield from _within(_windows(first, batches), start, stop)

    def close(self) -> None:
        """Closes the file."""
        self._file.close(force=True)


class ArrowTable:
    """An Arrow IPC file. One of its record batches is held at a time."""

    def __init__(self, location: Location) -> None:
        self._source = location.open()
        self._file = pa.ipc.open_file(self._source)
        self.schema = self._file.schema
        self._rows = self._count()
        self.rows = sum(self._rows)

    def _count(self) -> list[int]:
        """The rows of each record batch; reads one column of fixed width where there is one, else all."""
        fixed = [index for index, field in enumerate(self.schema) if pa.types.is_primitive(field.type)]
        file = pa.ipc.open_file(self._source, options=pa.ipc.IpcReadOptions(included_fields=fixed[:1]))
        return [file.get_batch(index).num_rows for index in range(file.num_record_batches)]

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """As of TableFile."""
        end = 0
        for index, rows in enumerate(self._rows):
            first, end = end, end + rows
            if first < stop and start < end:
                yield from _within(_windows(first, [self._file.get_batch(index)]), start, stop)

    def close(self) -> None:
        """Closes the file."""
        self._source.close()


class ScannedTable:
    """Rows that lie in memory, or that something else reads."""

    def __init__(self, schema: pa.Schema, rows: int, batches: Callable[[], Iterable[pa.RecordBatch]]) -> None:
        self.schema = schema
        self.rows = rows
        self._batches = batches

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """As of TableFile."""
        yield from _within(_windows(0, self._batches()), start, stop)

    def close(self) -> None:
        """Leaves the rows to whose they are."""


def _windows(first: int, batches: Iterable[pa.RecordBatch]) -> Iterator[Window]:
    """Batches of consecutive rows, cut into windows."""
    for batch in batches:
        rows = _window_rows(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, rows):
            yield first + start, batch.slice(start, rows)
        first += batch.num_rows


def _within(windows: Iterator[Window], start: int, stop: int) -> Iterator[Window]:
    """What of the windows lies between two rows."""
    for first, batch in windows:
        if first >= stop:
            return
        skipped = max(start - first, 0)
        rows = min(stop - first, batch.num_rows) - skipped
        if rows > 0:
            yield first + skipped, batch.slice(skipped, rows)


def _window_rows(rows: int, size: int) -> int:
    """How many rows of some that are so large make a window."""
    return max(1, min(ROW_BATCH_ROWS, ROW_BATCH_BYTES * rows // max(size, 1)))


class ParquetOut:
    """Writes Parquet, in groups of bounded size."""

    def __init__(self, file: pa.NativeFile, schema: pa.Schema) -> None:
        # Numbers of vectors do not repeat.
        leaves = chain.from_iterable(_leaves(field.name, field.type) for field in schema)
        dictionary = [path for path, kind in leaves if not pa.types.is_floating(kind)]
        self._writer = pq.ParquetWriter(file, schema, use_dictionary=dictionary, write_page_index=True)
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends rows."""
        self._waiting.append(batch)
        rows = sum(waiting.num_rows for waiting in self._waiting)
        if rows >= GROUP_ROWS or sum(waiting.nbytes for waiting in self._waiting) >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._waiting, self._schema)
        self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._waiting = []

    def close(self) -> None:
        """Writes what is left."""
        if self._waiting:
            self._flush()
        self._writer.close()


def _leaves(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """The columns of Parquet that one of Arrow becomes, by their paths, and what each holds."""
    if isinstance(kind, pa.BaseExtensionType):
        yield from _leaves(path, kind.storage_type)
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_map(kind):
        yield from _leaves(f"{path}.key_value.key", kind.key_type)
        yield from _leaves(f"{path}.key_value.value", kind.item_type)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    else:
        yield path, kind


class ArrowOut:
    """Writes an Arrow IPC file, a record batch for each window."""

    def __init__(self, file: pa.NativeFile, schema: pa.Schema) -> None:
        self._writer: Any = pa.ipc.new_file(file, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends rows."""
        self._writer.write_batch(batch)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
