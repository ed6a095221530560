"""The registry of table formats. One entry makes a format known to every job."""

import posixpath
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from attention_client.enrich.arrow_ipc import (
    ArrowFileReader,
    ArrowFileWriter,
    ArrowStreamReader,
    ArrowStreamWriter,
)
from attention_client.enrich.errors import EnrichError
from attention_client.enrich.parquet import ParquetReader, ParquetWriter
from attention_client.enrich.storage import Location
from attention_client.enrich.tables import TableReader, TableWriter


@dataclass(frozen=True)
class TableFormat:
    """A format of table files.

    Attributes:
        name: Name for error messages.
        suffixes: Endings of its files' names, in lower case.
        reader: Opens a file for reading.
        writer: Writes rows of a schema to an open file.
    """

    name: str
    suffixes: tuple[str, ...]
    reader: Callable[[Location], TableReader]
    writer: Callable[[pa.NativeFile, pa.Schema], TableWriter]


FORMATS = (
    TableFormat("Parquet", (".parquet", ".pq"), ParquetReader, ParquetWriter),
    TableFormat("Arrow IPC file", (".arrow", ".feather", ".ipc"), ArrowFileReader, ArrowFileWriter),
    TableFormat("Arrow IPC stream", (".arrows",), ArrowStreamReader, ArrowStreamWriter),
)
SUFFIXES = ", ".join(suffix for entry in FORMATS for suffix in entry.suffixes)


def is_table(name: str) -> bool:
    """Whether the ending of a file's name is that of a known format."""
    return _find(name) is not None


def open_table(location: Location) -> TableReader:
    """Opens a file in the format that its name states.

    Raises:
        EnrichError: The format is unknown, or the file is damaged.
    """
    entry = _require(location.path)
    try:
        return entry.reader(location)
    except (pa.ArrowException, OSError) as error:
        raise EnrichError(f"{location} cannot be read as {entry.name}: {error}") from error


def open_writer(name: str, file: pa.NativeFile, schema: pa.Schema) -> TableWriter:
    """Opens a writer of the format that a file's name states."""
    return _require(name).writer(file, schema)


def _find(name: str) -> TableFormat | None:
    suffix = posixpath.splitext(name)[1].lower()
    return next((entry for entry in FORMATS if suffix in entry.suffixes), None)


def _require(name: str) -> TableFormat:
    if (entry := _find(name)) is None:
        raise EnrichError(f"{name}: the name of a table ends in one of {SUFFIXES}")
    return entry
