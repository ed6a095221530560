"""What is read: files by their address, a table in memory, a data set of Arrow's."""

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
from attention_client.enrich.storage import Location, locate
from attention_client.enrich.tables import ROW_BATCH_ROWS, ScannedTable, TableFile, is_table, open_table


@dataclass(frozen=True)
class SourceFile:
    """Rows that lie together.

    Attributes:
        name: Path below the source; "" for that which is the source.
        rows: How many.
        size: Their bytes, as they are stored; 0 if unknown.
        stamp: Changes when they do.
    """

    name: str
    rows: int
    size: int
    stamp: Sequence[int] = ()


class Source(Protocol):
    """What a job reads.

    Attributes:
        schema: What each row has.
        files: Where rows lie, in their order.
        name: A file name for a result that has none of its own.
        is_lasting: Whether another process finds the same, so that a job on it can be resumed or spread.
        places: Files and folders that it reads.
    """

    schema: pa.Schema
    files: Sequence[SourceFile]
    name: str
    is_lasting: bool
    places: Sequence[Location]

    def open(self, name: str) -> TableFile:
        """Opens a file for reading."""

    def path(self, name: str) -> str:
        """What people know a file by."""


def open_source(source: Any) -> Source:
    """Looks at what is to be read, without reading its rows.

    Args:
        source: A path or URL; a data set of Arrow's; a table of Arrow's, or what Arrow makes one of: frames
            of pandas and Polars, relations of DuckDB.

    Raises:
        EnrichError: There is no such table, its files have different schemas, or it is none.
    """
    if isinstance(source, str | PathLike):
        return StoredTables(locate(fspath(source)))
    if isinstance(source, ds.Dataset):
        return _dataset(source)
    try:
        return _memory(_arrow(source))
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise EnrichError(f"{type(source).__name__} is no table: {error}") from error


class StoredTables:
    """A file, or all files below a folder."""

    is_lasting = True

    def __init__(self, location: Location) -> None:
        self._location = location
        self.places: Sequence[Location] = [location]
        self.name = posixpath.basename(location.path)
        files: list[SourceFile] = []
        schema: pa.Schema | None = None
        for name, info in self._infos():
            table = self.open(name)
            table.close()
            schema = schema or table.schema
            if not table.schema.equals(schema):
                raise EnrichError(f"{location}: {name} has another schema than {files[0].name}")
            files.append(SourceFile(name, table.rows, info.size, (info.size, info.mtime_ns)))
        if schema is None:
            raise EnrichError(f"{location} holds no table")
        self.schema = schema
        self.files: Sequence[SourceFile] = files

    def _infos(self) -> list[tuple[str, fs.FileInfo]]:
        location = self._location
        match location.kind:
            case fs.FileType.File:
                if not is_table(location.path):
                    raise EnrichError(f"{location}: {self.name} is neither .parquet nor .arrow")
                return [("", location.system.get_file_info(location.path))]
            case fs.FileType.Directory:
                return [(name, info) for name, info in location.files() if is_table(name)]
        raise EnrichError(f"{location} does not exist")

    def open(self, name: str) -> TableFile:
        """As of Source."""
        return open_table(self._file(name))

    def path(self, name: str) -> str:
        """As of Source."""
        return str(self._file(name))

    def _file(self, name: str) -> Location:
        return self._location / name if name else self._location


class Unstored:
    """A table in memory, or rows that something else reads."""

    is_lasting = False
    name = "table.parquet"

    def __init__(self, table: ScannedTable, size: int, places: Sequence[Location] = ()) -> None:
        self._table = table
        self.places = places
        self.schema = table.schema
        self.files: Sequence[SourceFile] = [SourceFile("", table.rows, size)]

    def open(self, name: str) -> TableFile:  # noqa: ARG002 - there is one
        """As of Source."""
        return self._table

    def path(self, name: str) -> str:  # noqa: ARG002 - there is one
        """As of Source."""
        return "table"


def _memory(table: pa.Table) -> Unstored:
    return Unstored(ScannedTable(table.schema, table.num_rows, table.to_batches), table.nbytes)


def _dataset(dataset: ds.Dataset) -> Unstored:
    ahead = {"batch_readahead": 1, "fragment_readahead": 1}
    batches = partial(dataset.to_batches, batch_size=ROW_BATCH_ROWS, **ahead)
    table = ScannedTable(dataset.schema, dataset.count_rows(), batches)
    return Unstored(table, 0, [_place(dataset.filesystem, path) for path in getattr(dataset, "files", ())])


def _place(system: fs.FileSystem, path: str) -> Location:
    return locate(path) if isinstance(system, fs.LocalFileSystem) else Location(system, path)


def _arrow(source: Any) -> pa.Table:
    """A table of Arrow's. pandas keeps (T, d) arrays in cells, which Arrow takes as lists of rows only."""
    if isinstance(source, pa.Table):
        return source
    if type(source).__module__.partition(".")[0] == "pandas":
        source = source.copy(deep=False)
        for name, kind in source.dtypes.items():
            if str(kind) == "object":
                source[name] = source[name].map(_listed)
    return pa.table(source)


def _listed(cell: Any) -> Any:
    return list(cell) if isinstance(cell, np.ndarray) and cell.ndim > 1 else cell
