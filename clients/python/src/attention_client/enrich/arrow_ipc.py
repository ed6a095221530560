"""Arrow IPC: the file format, and the stream format that Hugging Face datasets are cached in."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from attention_client.enrich.storage import Location
from attention_client.enrich.tables import RowBatch, clip, split


class ArrowFileReader:
    """An Arrow IPC file. One of its record batches is in memory at a time."""

    def __init__(self, location: Location) -> None:
        self._source = location.open()
        self._file = pa.ipc.open_file(self._source)
        self.schema = self._file.schema
        self._rows = self._count()
        self.rows = sum(self._rows)

    def _count(self) -> list[int]:
        """The rows of each record batch."""
        file = pa.ipc.open_file(self._source, options=_one_column(self.schema))
        return [file.get_batch(index).num_rows for index in range(file.num_record_batches)]

    def batches(self, start: int, stop: int) -> Iterator[RowBatch]:
        """See TableReader."""
        end = 0
        for index, rows in enumerate(self._rows):
            first, end = end, end + rows
            if first < stop and start < end:
                yield from clip(split(first, [self._file.get_batch(index)]), start, stop)

    def close(self) -> None:
        """Closes the file."""
        self._source.close()


class ArrowStreamReader:
    """An Arrow IPC stream. It has no index, so each reading starts at the beginning."""

    def __init__(self, location: Location) -> None:
        self._location = location
        with location.open() as source, pa.ipc.open_stream(source) as stream:
            self.schema = stream.schema
        with (
            location.open() as source,
            pa.ipc.open_stream(source, options=_one_column(self.schema)) as stream,
        ):
            self.rows = sum(batch.num_rows for batch in stream)

    def batches(self, start: int, stop: int) -> Iterator[RowBatch]:
        """See TableReader. Rows before `start` are read and dropped."""
        with self._location.open() as source, pa.ipc.open_stream(source) as stream:
            yield from clip(split(0, stream), start, stop)

    def close(self) -> None:
        """Does nothing: the file is open only while it is read."""


def _one_column(schema: pa.Schema) -> pa.ipc.IpcReadOptions:
    """Reads one column of fixed width, which is enough to count rows; all columns if there is none."""
    fixed = [index for index, field in enumerate(schema) if pa.types.is_primitive(field.type)]
    return pa.ipc.IpcReadOptions(included_fields=fixed[:1])


class _ArrowWriter:
    _writer: Any

    def write(self, rows: pa.RecordBatch) -> None:
        """Appends rows as one record batch."""
        self._writer.write_batch(rows)

    def close(self) -> None:
        """Writes the end of the file."""
        self._writer.close()


class ArrowFileWriter(_ArrowWriter):
    """Writes an Arrow IPC file."""

    def __init__(self, file: pa.NativeFile, schema: pa.Schema) -> None:
        self._writer = pa.ipc.new_file(file, schema)


class ArrowStreamWriter(_ArrowWriter):
    """Writes an Arrow IPC stream."""

    def __init__(self, file: pa.NativeFile, schema: pa.Schema) -> None:
        self._writer = pa.ipc.new_stream(file, schema)
