"""Sources and sinks of a job: files and folders, stored tables, tables in memory, Arrow datasets.

Files are local paths, or URLs of the file systems that Arrow or fsspec supports. Every table is read as
batches of rows of bounded size.
"""

import json
import posixpath
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from os import PathLike, fsencode, fspath
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs

from attention_client.enrich.outcome import EnrichError

Json: TypeAlias = dict[str, Any]
TEMPORARY = ".tmp"
# The rows of a batch are computed, held in memory and written together.
BATCH_ROWS = 1024
BATCH_BYTES = 4 << 20
# Rows of a Parquet file that are compressed together.
GROUP_ROWS = 1 << 16
GROUP_BYTES = 32 << 20
# The first bytes of an Arrow IPC file.
ARROW_FILE = b"ARROW1"
# Of a path, a part that begins with a dot or an underscore.
HIDDEN = re.compile(r"(^|/)[._]")
# Tables whose log states which of their rows are current: the folder of the log, a part of the names of its
# files, what the tables are called, and the Python package that reads them.
LOGS = (
    ("_delta_log", "", "Delta Lake", "deltalake"),
    (".hoodie", "", "Apache Hudi", "hudi"),
    ("metadata", ".metadata.json", "Apache Iceberg", "pyiceberg"),
)


@dataclass(frozen=True)
class Location:
    """A file or a folder, which need not exist.

    Attributes:
        system: Its file system.
        path: Its path in the file system.
        name: The path or URL as the caller wrote it, for messages; empty for `path`.
    """

    system: fs.FileSystem
    path: str
    name: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.name or self.path

    def __truediv__(self, name: str) -> "Location":
        return Location(self.system, posixpath.join(self.path, name), posixpath.join(str(self), name))

    def with_suffix(self, suffix: str) -> "Location":
        """The location in the same folder whose name has `suffix` appended."""
        return Location(self.system, self.path + suffix, f"{self}{suffix}")

    @property
    def file_type(self) -> fs.FileType:
        """Whether it is a file, a folder, or does not exist."""
        return self.system.get_file_info(self.path).type

    @property
    def exists(self) -> bool:
        """Whether it exists."""
        return self.file_type is not fs.FileType.NotFound

    def open(self) -> pa.NativeFile:
        """Opens a file for random reading."""
        return self.system.open_input_file(self.path)

    def files(self) -> Iterator[tuple[str, fs.FileInfo]]:
        """Every file below a folder, sorted by its path relative to the folder."""
        selector = fs.FileSelector(self.path, recursive=True, allow_not_found=True)
        with _utf8_names():
            infos = sorted(self.system.get_file_info(selector), key=lambda info: info.path)
        for info in infos:
            if info.is_file:
                yield posixpath.relpath(info.path, self.path), info

    def overlaps(self, other: "Location") -> bool:
        """Whether the two are the same, or one contains the other."""
        paths = [path.rstrip("/") + "/" for path in (self.path, other.path)]
        return self.system.equals(other.system) and posixpath.commonprefix(paths) in paths

    def make_folder(self) -> None:
        """Creates a folder and its parents; does nothing if it exists."""
        self.system.create_dir(self.path, recursive=True)

    @contextmanager
    def replaced(self) -> Iterator[pa.NativeFile]:
        """Opens a temporary file for writing, and renames it to this location if the block succeeds."""
        temporary = self.with_suffix(TEMPORARY)
        with self.system.open_output_stream(temporary.path) as file:
            yield file
        temporary.move(self)

    def write_json(self, value: Json) -> None:
        """Replaces the file with a JSON document."""
        with self.replaced() as file:
            file.write(json.dumps(value, indent=1).encode())

    def read_json(self) -> Json:
        """Reads a JSON document."""
        with self.open() as file:
            value: Json = json.load(file)
        return value

    def move(self, target: "Location") -> None:
        """Renames a file or a folder. A file system that cannot rename folders moves each file."""
        try:
            self.system.move(self.path, target.path)
        except (OSError, NotImplementedError):
            if self.file_type is not fs.FileType.Directory:
                raise
            for name, info in self.files():
                (target / posixpath.dirname(name)).make_folder()
                self.system.move(info.path, (target / name).path)
            self.remove()

    def remove(self) -> None:
        """Removes a file, or a folder with its content; does nothing if there is none."""
        match self.file_type:
            case fs.FileType.Directory:
                self.system.delete_dir(self.path)
            case fs.FileType.File:
                self.system.delete_file(self.path)


@contextmanager
def _utf8_names() -> Iterator[None]:
    """Refuses names of files that are not UTF-8, which Arrow can neither open nor list."""
    try:
        yield
    except UnicodeError as error:
        name = error.args[1]
        name = fsencode(name) if isinstance(name, str) else name
        raise EnrichError(f"{name!r} is not UTF-8, which the names of files must be: rename it") from error


def locate(address: str) -> Location:
    """Finds the file system of a local path or a URL such as s3://bucket/table.

    Raises:
        EnrichError: No file system is known for the URL, or the path is not UTF-8.
    """
    with _utf8_names():
        address.encode()
    if "://" not in address:
        path = Path(address).expanduser().absolute().as_posix()
        return Location(fs.LocalFileSystem(), path, address)
    try:
        system, path = fs.FileSystem.from_uri(address)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as unknown:
        try:
            import fsspec  # noqa: PLC0415 - optional, needed for some URLs only

            fsspec_system, path = fsspec.core.url_to_fs(address)
        except (ValueError, ImportError) as error:
            raise EnrichError(
                f"{address}: {unknown}; fsspec, if installed, may support it: {error}"
            ) from error
        system = fs.PyFileSystem(fs.FSSpecHandler(fsspec_system))
    return Location(system, path, address)


# Consecutive rows of a table, after the number of the first of them.
RowBatch: TypeAlias = tuple[int, pa.RecordBatch]
# Reads at least the rows from a first up to a last number.
Scan: TypeAlias = Callable[[int, int], Iterable[RowBatch]]


@dataclass(frozen=True, eq=False)
class Table:
    """A table that is open for reading.

    Attributes:
        schema: Its columns.
        rows: Number of its rows.
        scan: Reads its rows in batches of any size.
        close: Closes its file.
    """

    schema: pa.Schema
    rows: int
    scan: Scan
    close: Callable[[], None] = lambda: None

    def batches(self, start: int, stop: int) -> Iterator[RowBatch]:
        """The rows from `start` up to, but not including, `stop`.

        Where one batch ends and the next begins depends on the table, not on `start`.
        """
        for first, rows in self.scan(start, stop):
            step = rows_per_batch(rows.num_rows, rows.nbytes)
            for at in range(0, rows.num_rows, step):
                begin, end = max(at, start - first), min(at + step, rows.num_rows, stop - first)
                if begin < end:
                    yield first + begin, rows.slice(begin, end - begin)
            if first + rows.num_rows >= stop:
                return


def rows_per_batch(rows: int, size: int) -> int:
    """How many rows make a batch, if `rows` of them hold `size` bytes; at least one."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(size, 1)))


def _overlapping(sizes: Iterable[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The groups of rows that have some from `start` up to `stop`: the number of each, and its first row."""
    end = 0
    for index, rows in enumerate(sizes):
        first, end = end, end + rows
        if first < stop and start < end:
            yield index, first


def _number(
    batches: Iterable[pa.RecordBatch],
    first: int = 0,
    place: str = "the table",
    columns: Mapping[str, Iterable[pa.RecordBatch]] = {},
) -> Iterator[RowBatch]:
    """Numbers the rows of batches, from `first` on. Errors name the place, the column and the row.

    Args:
        batches: The batches.
        first: Number of the first row.
        place: What is read, for errors.
        columns: For each column, its batches: read only to find a damaged one.

    Raises:
        EnrichError: The batches cannot be read.
    """
    try:
        for batch in batches:
            yield first, batch
            first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        damaged = "".join(f", column {name!r}" for name, column in columns.items() if _is_damaged(column))
        raise EnrichError(f"{place}{damaged} cannot be read from row {first:,} on: {error}") from error


def _is_damaged(batches: Iterable[pa.RecordBatch]) -> bool:
    try:
        deque(batches, maxlen=0)
    except (pa.ArrowException, OSError):
        return True
    return False


def _open_parquet(location: Location) -> Table:
    """Decodes one batch of rows at a time; rows of a row group before the first are decoded and dropped."""
    file = pq.ParquetFile(location.open(), pre_buffer=False, buffer_size=1 << 20)
    metadata, schema = file.metadata, file.schema_arrow

    def scan(start: int, stop: int) -> Iterator[RowBatch]:
        sizes = (metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
        for index, first in _overlapping(sizes, start, stop):
            group = metadata.row_group(index)
            rows = rows_per_batch(group.num_rows, group.total_byte_size)
            read = partial(file.iter_batches, rows, row_groups=[index], use_threads=False)
            columns = {name: read(columns=[name]) for name in schema.names}
            yield from _number(read(), first, f"{location}, row group {index}", columns)

    return Table(schema, metadata.num_rows, scan, lambda: file.close(force=True))


def _open_arrow(location: Location) -> Table:
    """An Arrow IPC file or stream, whatever its name: Hugging Face datasets are streams named .arrow.

    One record batch is in memory at a time. A stream has no index, so each reading starts at its beginning.
    """
    with location.open() as source:
        is_file = source.read(len(ARROW_FILE)) == ARROW_FILE
        source.seek(0)
        schema = (pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)).schema

    def record_batches(index: int, columns: Sequence[int] = ()) -> Iterator[pa.RecordBatch]:
        options = pa.ipc.IpcReadOptions(included_fields=list(columns))
        with location.open() as source:
            if is_file:
                file = pa.ipc.open_file(source, options=options)
                yield from map(file.get_batch, range(index, file.num_record_batches))
            else:
                yield from islice(pa.ipc.open_stream(source, options=options), index, None)

    def read(index: int, first: int, selected: Sequence[int] = ()) -> Iterator[RowBatch]:
        columns = {name: record_batches(index, [number]) for number, name in enumerate(schema.names)}
        return _number(record_batches(index, selected), first, str(location), columns)

    def scan(start: int, stop: int) -> Iterator[RowBatch]:
        index, first = next(_overlapping(sizes, start, stop), (len(sizes), 0))
        return read(index, first)

    # One column of fixed width is enough to count rows; all columns are read if there is none.
    fixed = [index for index, column in enumerate(schema) if pa.types.is_primitive(column.type)]
    sizes = [batch.num_rows for _, batch in read(0, 0, fixed[:1])]
    return Table(schema, sum(sizes), scan)


class ParquetWriter:
    """Writes a Parquet file in row groups of bounded size."""

    def __init__(self, file: pa.NativeFile, schema: pa.Schema) -> None:
        # Floating-point numbers, also those of lists, rarely repeat: a dictionary of them only costs time.
        dictionary = [
            field.name
            for field in schema
            if not (pa.types.is_nested(field.type) or pa.types.is_floating(field.type))
        ]
        self._writer = pq.ParquetWriter(file, schema, use_dictionary=dictionary, write_page_index=True)
        self._schema = schema
        self._buffered: list[pa.RecordBatch] = []

    def write_batch(self, rows: pa.RecordBatch) -> None:
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


# Its methods `write_batch` and `close` leave the file open.
TableWriter: TypeAlias = pa.ipc.RecordBatchFileWriter | pa.ipc.RecordBatchStreamWriter | ParquetWriter


@dataclass(frozen=True)
class TableFormat:
    """A format of table files. An entry of FORMATS makes it known to every job.

    Attributes:
        name: Name for error messages.
        suffixes: Endings of its files' names, in lower case.
        read: Opens a file for reading.
        writer: Writes rows of a schema to an open file.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Callable[[Location], Table]
    writer: Callable[[pa.NativeFile, pa.Schema], TableWriter]


FORMATS = (
    TableFormat("Parquet", (".parquet", ".pq"), _open_parquet, ParquetWriter),
    TableFormat("Arrow IPC", (".arrow", ".feather", ".ipc"), _open_arrow, pa.ipc.new_file),
    TableFormat("Arrow IPC", (".arrows",), _open_arrow, pa.ipc.new_stream),
)
BY_SUFFIX = {suffix: entry for entry in FORMATS for suffix in entry.suffixes}
SUFFIXES = ", ".join(BY_SUFFIX)


def check_columns(row: pa.RecordBatch, name: str) -> None:
    """Checks that a file can hold the columns of a row.

    Args:
        row: The row; or none, for columns without rows.
        name: Name of the file.

    Raises:
        EnrichError: It cannot hold one of them.
    """
    for index, column in enumerate(row.columns):
        cell = row.select([index])
        try:
            # The parts of the result are streams. Arrow writes some columns that it cannot read.
            for create in (format_of(name).writer, pa.ipc.new_stream):
                file = pa.BufferOutputStream()
                with closing(create(file, cell.schema)) as writer:
                    writer.write_batch(cell)
            pa.ipc.open_stream(file.getvalue()).read_all()
        except (pa.ArrowException, OSError) as error:
            raise EnrichError(
                f"column {row.schema.names[index]!r} is {column.type}, which the output {name} cannot hold: "
                f"{error}; leave the column out, or convert it"
            ) from error


def share_dictionaries(first: pa.RecordBatch, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows whose dictionaries begin with those of other rows. In an Arrow IPC file, all rows share them.

    Raises:
        EnrichError: The dictionaries of a column cannot be joined.
    """
    columns = []
    for name, before, column in zip(rows.schema.names, first.columns, rows.columns, strict=True):
        is_same = isinstance(column, pa.DictionaryArray) and column.dictionary.equals(before.dictionary)
        try:
            joined = pa.chunked_array([before, column])
            columns.append(column if is_same else joined.unify_dictionaries().chunk(1))
        except pa.ArrowException as error:
            raise EnrichError(
                f"column {name!r} has dictionaries that one Arrow IPC file cannot hold: {error}; name an "
                "output that ends in .arrows or .parquet"
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def is_table(name: str) -> bool:
    """Whether the ending of a file's name is that of a known format."""
    return posixpath.splitext(name)[1].lower() in BY_SUFFIX


def format_of(name: str) -> TableFormat:
    """The format that a file's name states.

    Raises:
        EnrichError: It is unknown.
    """
    if not is_table(name):
        raise EnrichError(f"{name}: the name of a table ends in one of {SUFFIXES}")
    return BY_SUFFIX[posixpath.splitext(name)[1].lower()]


def open_table(location: Location) -> Table:
    """Opens a file in the format that its name states.

    Raises:
        EnrichError: The format is unknown, or the file is damaged.
    """
    entry = format_of(location.path)
    try:
        table = entry.read(location)
        table.schema.names  # noqa: B018 - decodes the names of the columns
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise EnrichError(f"{location} cannot be read as {entry.name}: {error}") from error
    return table


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


@dataclass(frozen=True, eq=False)
class TableSource:
    """What a job reads.

    Attributes:
        schema: Columns of every file.
        files: The files in the order of their rows.
        locations: Files and folders that are read; of a stored table, one.
        table: Rows that last as long as this process; None for a stored table, which other processes and
            later runs read alike, as resuming and a cluster need.
    """

    schema: pa.Schema
    files: Sequence[SourceFile]
    locations: Sequence[Location]
    table: Table | None = None

    @cached_property
    def name(self) -> str:
        """File name of the result, if the output is a folder and the source is one file."""
        return "table.parquet" if self.table else posixpath.basename(self.locations[0].path)

    def open(self, name: str) -> Table:
        """Opens a file for reading."""
        return self.table or open_table(self._file(name))

    def no_rows(self) -> pa.RecordBatch:
        """A batch of no rows."""
        return pa.RecordBatch.from_arrays(
            [pa.nulls(0, field.type) for field in self.schema], schema=self.schema
        )

    def path(self, name: str) -> str:
        """The path of a file, for people."""
        return "table" if self.table else str(self._file(name))

    def _file(self, name: str) -> Location:
        return self.locations[0] / name if name else self.locations[0]


def open_source(source: Any) -> TableSource:
    """Reads the schema and the number of rows.

    Args:
        source: A path or URL; an Arrow dataset; an Arrow table, or an object that Arrow converts to one:
            pandas and Polars data frames, DuckDB relations.

    Raises:
        EnrichError: The source does not exist, is not a table or has a log, or its files have different
            schemas.
    """
    if isinstance(source, str | PathLike):
        return _stored(locate(fspath(source)))
    if isinstance(source, ds.Dataset):
        return _dataset(source)
    if type(source).__name__ == "LazyFrame":
        raise EnrichError("a LazyFrame has no rows before it is collected: pass frame.collect()")
    try:
        table = _to_arrow(source)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise EnrichError(
            f"{type(source).__name__} is not a table: {error}; pass a path, a URL, an Arrow table or "
            "dataset, a data frame or a DuckDB relation"
        ) from error
    file = SourceFile("", table.num_rows, table.nbytes)
    scanned = Table(table.schema, table.num_rows, lambda *_: _number(table.to_batches()))
    return TableSource(table.schema, [file], (), scanned)


def _stored(location: Location) -> TableSource:
    """A file, or all files below a folder."""
    match location.file_type:
        case fs.FileType.File:
            listing = [("", location.system.get_file_info(location.path))]
        case fs.FileType.Directory:
            listing = list(location.files())
        case _:
            raise EnrichError(f"{location} does not exist")
    refuse_table_log(location, [name for name, _ in listing])
    files: list[SourceFile] = []
    schema: pa.Schema | None = None
    for name, info in listing:
        if HIDDEN.search(name) or (name and not is_table(name)):
            continue
        with closing(open_table(location / name if name else location)) as table:
            schema = schema or table.schema
            if not table.schema.equals(schema):
                raise EnrichError(f"{location}: {name} and {files[0].name} have different schemas")
            files.append(SourceFile(name, table.rows, info.size, (info.size, info.mtime_ns)))
    if schema is None:
        raise EnrichError(f"{location} contains no table; the names of tables end in {SUFFIXES}")
    return TableSource(schema, files, [location])


def refuse_table_log(location: Location, files: Iterable[str] = (), advice: str = "") -> None:
    """Refuses tables with a log: their files also have rows that were removed.

    Args:
        location: A file or a folder, which need not exist. Its parents are looked at, too.
        files: Paths of the files below it.
        advice: What to do instead; empty if the table was to be read.

    Raises:
        EnrichError: It is a part of such a table, or contains one.
    """
    paths, folders = [*files], [location.path]
    while (parent := posixpath.dirname(folders[-1])) not in ("", folders[-1]):
        folders.append(parent)
    with suppress(OSError):  # a parent that may not be read
        for folder in folders:
            for log, *_ in LOGS:
                selector = fs.FileSelector(posixpath.join(folder, log), allow_not_found=True)
                paths += [info.path for info in location.system.get_file_info(selector)]
    for path in paths:
        *parents, name = path.split("/")
        for log, part, kind, package in LOGS:
            if log in parents and part in name:
                reason = f"{path} belongs to the log of a {kind} table, which states what rows are current"
                read = f"read the current version with the Python package {package}, and pass that table to"
                read += " enrich() or write it as plain Parquet"
                raise EnrichError(f"{location}: {reason}: {advice or read}")


def _dataset(dataset: ds.Dataset) -> TableSource:
    read = partial(dataset.to_batches, batch_size=BATCH_ROWS, batch_readahead=1, fragment_readahead=1)
    table = Table(dataset.schema, dataset.count_rows(), lambda *_: _number(read(), place="the dataset"))
    paths, system = getattr(dataset, "files", ()), getattr(dataset, "filesystem", None)
    is_local = isinstance(system, fs.LocalFileSystem)
    locations = [locate(path) if is_local else Location(system, path) for path in paths]
    return TableSource(dataset.schema, [SourceFile("", table.rows, 0)], locations, table)


def _to_arrow(source: Any) -> pa.Table:
    """Converts a table. Arrow accepts (T, d) arrays in cells of pandas only as lists of their rows."""
    if isinstance(source, pa.Table):
        return source
    # Arrow would convert categories to dictionaries of string views, which Parquet cannot hold.
    if type(source).__module__.partition(".")[0] == "polars":
        return source.to_arrow()
    if type(source).__module__.partition(".")[0] == "pandas":
        source = source.copy(deep=False)
        for name, dtype in source.dtypes.items():
            if str(dtype) == "object":
                source[name] = source[name].map(
                    lambda cell: list(cell) if isinstance(cell, np.ndarray) and cell.ndim > 1 else cell
                )
    return pa.table(source)


def locate_target(output: str, source: TableSource) -> Location:
    """The location of the output.

    Raises:
        EnrichError: It overlaps the input, is a file for a folder, or belongs to a table with a log.
    """
    if not output:
        raise EnrichError("the output has no name: give a path or URL")
    target = locate(output.rstrip("/") or output)
    refuse_table_log(target, advice="choose another output")
    for location in source.locations:
        if target.overlaps(location):
            raise EnrichError(f"the output {target} overlaps the input {location}: choose another output")
    is_folder = [file.name for file in source.files] != [""]
    if is_folder and is_table(target.path):
        raise EnrichError(f"the input is a folder and the output {target} is a file: name a folder")
    has_suffix = posixpath.splitext(target.path)[1] != "" and not output.endswith("/")
    if has_suffix and not is_folder and not is_table(target.path):
        raise EnrichError(f"{target} ends in none of {SUFFIXES}; the name of a folder ends in /")
    return target


def check_replaceable(target: Location, *, overwrite: bool, resume: bool) -> None:
    """Checks that an existing output may be replaced.

    Raises:
        EnrichError: The options do not say to replace it, or it contains anything but tables.
    """
    if not overwrite:
        hint = " and is not the result of this job" if resume else ""
        raise EnrichError(f"{target} exists{hint}: --overwrite (overwrite=True) replaces it")
    if target.file_type is fs.FileType.Directory:
        for name, _ in target.files():
            if not is_table(name):
                raise EnrichError(f"{target} contains {name}, which is not a table: it is not replaced")
