"""What a job reads: stored tables, tables in memory, Arrow datasets."""

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from attention_client.enrich.errors import EnrichError
from attention_client.enrich.formats import SUFFIXES, is_table, open_table
from attention_client.enrich.storage import Location, locate
from attention_client.enrich.tables import BATCH_ROWS, ScannedTable, TableReader


@dataclass(frozen=True)
class SourceFile:
    """One file of a source.

    Attributes:
        name: Path relative to the source; "" if the file is the source.
        rows: Number of its rows.
        size: Bytes in storage or in memory; 0 if unknown.
        stamp: Size and time of the last change, to notice changes; empty if unknown.
    """

    name: str
    rows: int
    size: int
    stamp: Sequence[int] = ()


class TableSource(Protocol):
    """What a job reads.

    Attributes:
        schema: Columns of every file.
        files: The files in the order of their rows.
        name: File name of the result, if the output is a folder and the source is one file.
        is_stored: Whether other processes and later runs read the same, as resuming and a cluster need.
        locations: Files and folders that are read.
    """

    schema: pa.Schema
    files: Sequence[SourceFile]
    name: str
    is_stored: bool
    locations: Sequence[Location]

    def open(self, name: str) -> TableReader:
        """Opens a file for reading."""

    def path(self, name: str) -> str:
        """The path of a file, for people."""


def open_source(source: Any) -> TableSource:
    """Reads the schema and the number of rows.

    Args:
        source: A path or URL; an Arrow dataset; an Arrow table, or an object that Arrow converts to one:
            pandas and Polars data frames, DuckDB relations.

    Raises:
        EnrichError: The source does not exist, is not a table, or its files have different schemas.
    """
    if isinstance(source, str | PathLike):
        return StoredSource(locate(fspath(source)))
    if isinstance(source, ds.Dataset):
        return _dataset_source(source)
    if type(source).__name__ == "LazyFrame":
        raise EnrichError("a LazyFrame has no rows before it is collected: pass frame.collect()")
    try:
        return _memory_source(_to_arrow(source))
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise EnrichError(
            f"{type(source).__name__} is not a table: {error}; pass a path, a URL, an Arrow table or "
            "dataset, a data frame or a DuckDB relation"
        ) from error


class StoredSource:
    """A file, or all files below a folder."""

    is_stored = True

    def __init__(self, location: Location) -> None:
        self._location = location
        self.locations: Sequence[Location] = [location]
        self.name = posixpath.basename(location.path)
        files: list[SourceFile] = []
        schema: pa.Schema | None = None
        for name, info in self._infos():
            table = self.open(name)
            table.close()
            schema = schema or table.schema
            if not table.schema.equals(schema):
                raise EnrichError(f"{location}: {name} and {files[0].name} have different schemas")
            files.append(SourceFile(name, table.rows, info.size, (info.size, info.mtime_ns)))
        if schema is None:
            raise EnrichError(f"{location} contains no table; the names of tables end in {SUFFIXES}")
        self.schema = schema
        self.files: Sequence[SourceFile] = files

    def _infos(self) -> list[tuple[str, fs.FileInfo]]:
        location = self._location
        match location.file_type:
            case fs.FileType.File:
                return [("", location.system.get_file_info(location.path))]
            case fs.FileType.Directory:
                return [(name, info) for name, info in location.files() if is_table(name)]
        raise EnrichError(f"{location} does not exist")

    def open(self, name: str) -> TableReader:
        """See TableSource."""
        return open_table(self._file(name))

    def path(self, name: str) -> str:
        """See TableSource."""
        return str(self._file(name))

    def _file(self, name: str) -> Location:
        return self._location / name if name else self._location


class TransientSource:
    """A table in memory, or rows that another library reads. It lasts as long as this process."""

    is_stored = False
    name = "table.parquet"

    def __init__(self, table: ScannedTable, size: int, locations: Sequence[Location] = ()) -> None:
        self._table = table
        self.locations = locations
        self.schema = table.schema
        self.files: Sequence[SourceFile] = [SourceFile("", table.rows, size)]

    def open(self, name: str) -> TableReader:  # noqa: ARG002 - there is one table
        """See TableSource."""
        return self._table

    def path(self, name: str) -> str:  # noqa: ARG002 - there is one table
        """See TableSource."""
        return "table"


def _memory_source(table: pa.Table) -> TransientSource:
    return TransientSource(ScannedTable(table.schema, table.num_rows, table.to_batches), table.nbytes)


def _dataset_source(dataset: ds.Dataset) -> TransientSource:
    ahead = {"batch_readahead": 1, "fragment_readahead": 1}
    scan = partial(dataset.to_batches, batch_size=BATCH_ROWS, **ahead)
    table = ScannedTable(dataset.schema, dataset.count_rows(), scan)
    paths = getattr(dataset, "files", ())
    return TransientSource(table, 0, [_location(dataset.filesystem, path) for path in paths])


def _location(system: fs.FileSystem, path: str) -> Location:
    return locate(path) if isinstance(system, fs.LocalFileSystem) else Location(system, path)


def _to_arrow(source: Any) -> pa.Table:
    """Converts a table. Arrow accepts (T, d) arrays in cells of pandas only as lists of their rows."""
    if isinstance(source, pa.Table):
        return source
    if type(source).__module__.partition(".")[0] == "pandas":
        source = source.copy(deep=False)
        for name, dtype in source.dtypes.items():
            if str(dtype) == "object":
                source[name] = source[name].map(_to_rows)
    return pa.table(source)


def _to_rows(cell: Any) -> Any:
    return list(cell) if isinstance(cell, np.ndarray) and cell.ndim > 1 else cell
