"""The plan of a job: which rows are computed in which chunk, and what each output row holds."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from attention_client.enrich.backend import ModelSpec
from attention_client.enrich.checks import check_columns, check_first_rows, check_model
from attention_client.enrich.layout import result_schema
from attention_client.enrich.options import JobOptions
from attention_client.enrich.sources import SourceFile, TableSource
from attention_client.enrich.storage import Json

# A job that is killed loses at most one chunk: this many rows and, by the size of the file, bytes of input.
CHUNK_ROWS = 16 * 1024
CHUNK_BYTES = 64 << 20
# Key of the output column's metadata that identifies the job.
JOB_KEY = b"job"


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file, which are recorded as finished together.

    Attributes:
        index: Position among all chunks, from 0.
        name: Path of the file relative to the source.
        start: First row in the file.
        stop: Row after the last.
    """

    index: int
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class JobPlan:
    """What a job reads and writes.

    Attributes:
        source: The input.
        output_schema: Columns of the source, and the new columns.
        fingerprint: Differs between jobs whose results may differ.
    """

    source: TableSource
    output_schema: pa.Schema
    fingerprint: Json

    @property
    def chunks(self) -> Iterator[Chunk]:
        """Every chunk in the order of its rows. A file without rows has one chunk."""
        index = 0
        for file in self.source.files:
            step = _chunk_rows(file)
            for start in range(0, max(file.rows, 1), step):
                yield Chunk(index, file.name, start, min(start + step, file.rows))
                index += 1


def _chunk_rows(file: SourceFile) -> int:
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES * file.rows // max(file.size, 1)))


def make_plan(source: TableSource, model: ModelSpec, options: JobOptions) -> JobPlan:
    """Checks that the model can compute the table, and plans the job.

    Reads the first rows only.

    Raises:
        EnrichError: The options do not fit the model or the table.
    """
    check_model(options, model)
    check_columns(source.schema, model, options)
    check_first_rows(source, model, options)
    fingerprint = _fingerprint(source, model, options)
    return JobPlan(
        source, _output_schema(source.schema, model, options, _digest_of(fingerprint)), fingerprint
    )


def _output_schema(schema: pa.Schema, model: ModelSpec, options: JobOptions, job: str) -> pa.Schema:
    made_by: dict[str | bytes, str] = {
        "model": model.name,
        "version": model.version,
        "pool": str(options.pool),
        JOB_KEY: job,
    }
    return result_schema(schema, model, options, made_by)


def _fingerprint(source: TableSource, model: ModelSpec, options: JobOptions) -> Json:
    """What a resumed job must have in common with the job that it continues.

    How it treats refused rows may change.
    """
    files = [[file.name, file.rows, *file.stamp] for file in source.files]
    return {
        "files": _digest(json.dumps(files).encode()),
        "schema": _digest(source.schema.serialize().to_pybytes()),
        "model": model.name,
        "version": model.version,
        "options": {
            "columns": {str(role): name for role, name in options.columns.items()},
            "output_column": options.vectors_column(model),
            "weights_column": options.weights_column,
            "pool": str(options.pool),
        },
        "texts": {
            "template": options.template,
            "prompt": options.prompt,
            "dimensions": options.dimensions,
            "truncate": options.truncate,
            "passages": [options.layout, options.passage_tokens, options.passage_overlap or 0],
        },
        "chunks": [CHUNK_ROWS, CHUNK_BYTES],
    }


def _digest_of(fingerprint: Json) -> str:
    return _digest(json.dumps(fingerprint, sort_keys=True).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
