"""What a job does, piece by piece: the same input and options make the same pieces."""

import hashlib
import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa
from pyarrow import fs

from attention_client.enrich.columns import vectors_type, weights_type
from attention_client.enrich.computing import ModelFacts, Role
from attention_client.enrich.errors import EnrichError
from attention_client.enrich.pooling import Pool
from attention_client.enrich.storage import Json, Location
from attention_client.enrich.tables import is_table, open_table

# Rows whose results are lost at most when a job is killed.
PIECE_ROWS = 16 * 1024
CONTEXT_VECTORS = "context_vectors"
ATTENTION_WEIGHTS = "attention_weights"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked of every row.

    Attributes:
        columns: By role the column that holds its sequences.
        output_column: Name of the new column.
        weights_column: Name of the column of attention weights; None for none.
        pool: What becomes of the context vectors of a row.
        skip_refused: Whether a row that the model refuses gets null, rather than ending the job.
    """

    columns: Mapping[Role, str]
    output_column: str = CONTEXT_VECTORS
    weights_column: str | None = None
    pool: Pool = Pool.NONE
    skip_refused: bool = False


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one file: the unit that is done or not done.

    Attributes:
        index: Its place among all pieces.
        name: The path of its file below the input, and of its results below the output.
        start: Its first row in the file.
        stop: The row behind its last.
    """

    index: int
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """The whole job.

    Attributes:
        source: The input: a file or a folder.
        files: Path below the input and number of rows of each of its files; the path of a single file is "".
        schema: What each row of the input has.
        output_schema: The same and the new columns.
        fingerprint: Tells the job from any other whose results would differ.
    """

    source: Location
    files: Sequence[tuple[str, int]]
    schema: pa.Schema
    output_schema: pa.Schema
    fingerprint: Json

    @property
    def pieces(self) -> Iterator[Piece]:
        """Every piece in the order of its rows. A file without rows is a piece as well."""
        index = 0
        for name, rows in self.files:
            for start in range(0, max(rows, 1), PIECE_ROWS):
                yield Piece(index, name, start, min(start + PIECE_ROWS, rows))
                index += 1

    def file(self, name: str) -> Location:
        """Where a file of the input lies."""
        return self.source / name if name else self.source


def make_plan(source: Location, facts: ModelFacts, options: Options) -> Plan:
    """Looks at the input without reading its rows.

    Raises:
        EnrichError: There is no such table, its files have different schemas, or it cannot be what the
            options take it for.
    """
    infos = _files(source)
    files: list[tuple[str, int]] = []
    schema: pa.Schema | None = None
    for name, _ in infos:
        table = open_table(source / name if name else source)
        files.append((name, table.rows))
        schema = schema or table.schema
        if not table.schema.equals(schema):
            raise EnrichError(f"{source}: {name} has another schema than {infos[0][0]}")
        table.close()
    if schema is None:
        raise EnrichError(f"{source} holds no table")
    output_schema = _output_schema(schema, facts, options)
    return Plan(source, files, schema, output_schema, _fingerprint(infos, schema, facts, options))


def _files(source: Location) -> list[tuple[str, fs.FileInfo]]:
    match source.kind:
        case fs.FileType.File:
            if not is_table(source.path):
                raise EnrichError(
                    f"{source}: {posixpath.basename(source.path)} is neither .parquet nor .arrow"
                )
            return [("", source.system.get_file_info(source.path))]
        case fs.FileType.Directory:
            return [(name, info) for name, info in source.files() if is_table(name)]
    raise EnrichError(f"{source} does not exist")


def _output_schema(schema: pa.Schema, facts: ModelFacts, options: Options) -> pa.Schema:
    if set(options.columns) != set(facts.widths):
        takes, given = ", ".join(facts.widths), ", ".join(options.columns)
        raise EnrichError(f"model {facts.name!r} takes {takes}; columns are given for {given}")
    for role, column in options.columns.items():
        if schema.get_field_index(column) < 0:
            known = ", ".join(schema.names)
            raise EnrichError(f"there is no column {column!r} for the {role}; there are: {known}")
    made_by = {"model": facts.name, "version": facts.version, "pool": str(options.pool)}
    kind = vectors_type(facts.output_width, pooled=options.pool is not Pool.NONE)
    added = [pa.field(options.output_column, kind, metadata=made_by)]
    if options.weights_column:
        added.append(pa.field(options.weights_column, weights_type(), metadata=made_by))
    for field in added:
        if field.name in schema.names:
            raise EnrichError(f"the table has a column {field.name!r}; name another with --output-column")
        schema = schema.append(field)
    return schema


def _fingerprint(
    infos: list[tuple[str, fs.FileInfo]], schema: pa.Schema, facts: ModelFacts, options: Options
) -> Json:
    files = [[name, info.size, info.mtime_ns] for name, info in infos]
    shape = hashlib.sha256(schema.serialize().to_pybytes()).hexdigest()
    wanted: Json = {**asdict(options), "columns": {str(role): name for role, name in options.columns.items()}}
    return {
        "files": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        "schema": shape,
        "model": facts.name,
        "version": facts.version,
        "options": wanted,
        "piece_rows": PIECE_ROWS,
    }
