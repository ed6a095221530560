"""What a job does, chunk by chunk: the same input and options make the same chunks."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import pyarrow as pa

from attention_client.enrich.backend import ModelSpec, Role
from attention_client.enrich.columns import vectors_type, weights_type
from attention_client.enrich.errors import EnrichError
from attention_client.enrich.pooling import Pool
from attention_client.enrich.sources import Source, SourceFile
from attention_client.enrich.storage import Json

# What is lost at most when a job is killed: rows and, as the file's size says, bytes of input.
CHUNK_ROWS = 16 * 1024
CHUNK_BYTES = 64 << 20
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
class Chunk:
    """Consecutive rows of one file: the unit that is done or not done.

    Attributes:
        index: Its place among all chunks.
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
        source: The input.
        output_schema: What each row of it has, and the new columns.
        fingerprint: Tells the job from any other whose results would differ.
    """

    source: Source
    output_schema: pa.Schema
    fingerprint: Json

    @property
    def chunks(self) -> Iterator[Chunk]:
        """Every chunk in the order of its rows. A file without rows is a chunk as well."""
        index = 0
        for file in self.source.files:
            step = _chunk_rows(file)
            for start in range(0, max(file.rows, 1), step):
                yield Chunk(index, file.name, start, min(start + step, file.rows))
                index += 1


def _chunk_rows(file: SourceFile) -> int:
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES * file.rows // max(file.size, 1)))


def make_plan(source: Source, model: ModelSpec, options: Options) -> Plan:
    """Decides what is done.

    Raises:
        EnrichError: The input cannot be what the options take it for.
    """
    return Plan(source, _output_schema(source.schema, model, options), _fingerprint(source, model, options))


def _output_schema(schema: pa.Schema, model: ModelSpec, options: Options) -> pa.Schema:
    if set(options.columns) != set(model.input_widths):
        takes, given = ", ".join(model.input_widths), ", ".join(options.columns)
        raise EnrichError(f"model {model.name!r} takes {takes}; columns are given for {given}")
    for role, column in options.columns.items():
        if schema.get_field_index(column) < 0:
            known = ", ".join(schema.names)
            raise EnrichError(f"there is no column {column!r} for the {role}; there are: {known}")
    if model.pooled and options.pool is not Pool.NONE:
        raise EnrichError(f"model {model.name!r} returns one vector per sequence already: leave out --pool")
    made_by = {"model": model.name, "version": model.version, "pool": str(options.pool)}
    kind = vectors_type(model.output_width, pooled=model.pooled or options.pool is not Pool.NONE)
    added = [pa.field(options.output_column, kind, metadata=made_by)]
    if options.weights_column:
        added.append(pa.field(options.weights_column, weights_type(), metadata=made_by))
    for field in added:
        if field.name in schema.names:
            raise EnrichError(f"the table has a column {field.name!r}; name another with --output-column")
        schema = schema.append(field)
    return schema


def _fingerprint(source: Source, model: ModelSpec, options: Options) -> Json:
    """What a resumed job must have in common with the one that began. It may begin to skip refused rows."""
    files = [[file.name, file.rows, *file.stamp] for file in source.files]
    wanted: Json = {**asdict(options), "columns": {str(role): name for role, name in options.columns.items()}}
    del wanted["skip_refused"]
    return {
        "files": _digest(json.dumps(files).encode()),
        "schema": _digest(source.schema.serialize().to_pybytes()),
        "model": model.name,
        "version": model.version,
        "options": wanted,
        "chunks": [CHUNK_ROWS, CHUNK_BYTES],
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
