"""Parquet files."""

from collections.abc import Iterator
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq

from attention_client.enrich.storage import Location
from attention_client.enrich.tables import RowBatch, clip, rows_per_batch, split

# Rows of an output file that are compressed together.
GROUP_ROWS = 1 << 16
GROUP_BYTES = 32 << 20


class ParquetReader:
    """A Parquet file, decoded one batch of rows at a time."""

    def __init__(self, location: Location) -> None:
        self._file = pq.ParquetFile(location.open(), pre_buffer=False, buffer_size=1 << 20)
        self.schema = self._file.schema_arrow
        self.rows = self._file.metadata.num_rows

    def batches(self, start: int, stop: int) -> Iterator[RowBatch]:
        """See TableReader. Rows of a row group before `start` are decoded and dropped."""
        metadata = self._file.metadata
        end = 0
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            first, end = end, end + group.num_rows
            if first < stop and start < end:
                rows = rows_per_batch(group.num_rows, group.total_byte_size)
                decoded = self._file.iter_batches(rows, row_groups=[index], use_threads=False)
                yield from clip(split(first, decoded), start, stop)

    def close(self) -> None:
        """Closes the file."""
        self._file.close(force=True)


class ParquetWriter:
    """Writes a Parquet file in row groups of bounded size."""

    def __init__(self, file: pa.NativeFile, schema: pa.Schema) -> None:
        # Floating-point numbers rarely repeat, so a dictionary of them only costs time.
        leaves = chain.from_iterable(_leaves(field.name, field.type) for field in schema)
        dictionary = [path for path, data_type in leaves if not pa.types.is_floating(data_type)]
        self._writer = pq.ParquetWriter(file, schema, use_dictionary=dictionary, write_page_index=True)
        self._schema = schema
        self._buffered: list[pa.RecordBatch] = []

    def write(self, rows: pa.RecordBatch) -> None:
        """Appends rows."""
        self._buffered.append(rows)
        count = sum(batch.num_rows for batch in self._buffered)
        if count >= GROUP_ROWS or sum(batch.nbytes for batch in self._buffered) >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._buffered, self._schema)
        self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._buffered = []

    def close(self) -> None:
        """Writes buffered rows and the file's footer."""
        if self._buffered:
            self._flush()
        self._writer.close()


def _leaves(path: str, data_type: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """The Parquet columns that an Arrow column becomes: the path and the type of each."""
    if isinstance(data_type, pa.BaseExtensionType):
        yield from _leaves(path, data_type.storage_type)
    elif pa.types.is_struct(data_type):
        for field in data_type:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_map(data_type):
        yield from _leaves(f"{path}.key_value.key", data_type.key_type)
        yield from _leaves(f"{path}.key_value.value", data_type.item_type)
    elif isinstance(data_type, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        yield from _leaves(f"{path}.list.element", data_type.value_type)
    else:
        yield path, data_type
