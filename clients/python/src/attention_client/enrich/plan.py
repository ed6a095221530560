"""The plan of a job: can the model compute the table, in which chunks, and what does each output row hold."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import pyarrow as pa

from attention_client import EncoderInfo
from attention_client.enrich import cells
from attention_client.enrich.model import POOLED_RANK, VECTORS_RANK, JobModel
from attention_client.enrich.options import EnrichOptions, PassageLayout, Pool, Role
from attention_client.enrich.outcome import EnrichError, Refusal
from attention_client.enrich.tables import Json, TableSource, locate

# A chunk has at most this many rows and, by the size of the file, bytes of input.
CHUNK_ROWS = 16 * 1024
CHUNK_BYTES = 64 << 20
# Key of the new columns' metadata that identifies the job.
JOB_KEY = b"job"
PASSAGE_TYPES = {"passage": pa.string(), "passage_start": pa.int32(), "passage_end": pa.int32()}
# Reason of a text with too many tokens.
LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
# Options that change how a job runs and not its result.
RUN_OPTIONS = ("tokenizer", "on_error", "max_errors", "resume", "overwrite", "progress")
# Options of text encoders that need a certain output, and those that do not.
HEADS = {"dimensions": "dense", "output_type": "dense", "top_k": "sparse"}
ENCODER_ONLY = (*HEADS, "prompt", "input_kind", "outputs", "truncate", "passage_tokens")
# Token vectors of rows that are computed together, in bytes, by a guess of their number.
RESULT_BYTES = 256 << 20


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file, which one process computes.

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
    """What a job reads, computes and writes.

    Attributes:
        source: The input.
        model: The model.
        options: Options of the job.
        kept_columns: Numbers of the columns of the source that stay.
        output_schema: Those, and the new columns.
        fingerprint: Differs between jobs whose results may differ.
    """

    source: TableSource
    model: JobModel
    options: EnrichOptions
    kept_columns: Sequence[int]
    output_schema: pa.Schema
    fingerprint: Json

    @property
    def chunks(self) -> Iterator[Chunk]:
        """Every chunk in the order of its rows. A file without rows has one chunk."""
        index = 0
        for file in self.source.files:
            step = max(1, min(CHUNK_ROWS, CHUNK_BYTES * file.rows // max(file.size, 1)))
            for start in range(0, max(file.rows, 1), step):
                yield Chunk(index, file.name, start, min(start + step, file.rows))
                index += 1

    def first_row(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The first row of the output for rows of the source, with null in the new columns; or none."""
        first = rows.slice(0, 1)
        kept = [first.column(index) for index in self.kept_columns]
        nulls = [pa.nulls(first.num_rows, field.type) for field in list(self.output_schema)[len(kept) :]]
        return pa.RecordBatch.from_arrays([*kept, *nulls], schema=self.output_schema)

    def rows_at_once(self, rows: pa.RecordBatch) -> int:
        """How many of the rows are computed together, at least one, so that their results fit the memory."""
        # A token has about as many bytes as an element of its vector.
        width = self.model.token_width if "token_vectors" in self.options.heads else 1
        return max(1, RESULT_BYTES * int(rows.num_rows) // max(int(rows.nbytes) * width, 1))

    def advice(self, refusal: Refusal) -> str:
        """What else may help against a refusal, to append to an error; empty if nothing is known."""
        if refusal.reason == LIMIT_EXCEEDED and self.model.text_encoder and not self.options.truncate:
            return "; --truncate (truncate=True) cuts texts to the tokens that the model takes"
        return ""

    @property
    def pooled(self) -> bool:
        """Whether there is one vector for each sequence."""
        return self.model.pooled or self.options.pool is not Pool.NONE


def make_plan(source: TableSource, model: JobModel, options: EnrichOptions) -> JobPlan:
    """Checks that the model can compute the table, and plans the job.

    Raises:
        EnrichError: The options do not fit the model or the table.
    """
    _check_model(options, model)
    if options.dimensions is not None:
        model = replace(model, output=(*model.output[:-1], options.dimensions))
    if (output_type := options.output_type) is not None:
        width = -(-model.output_width // 8) if output_type.endswith("binary") else model.output_width
        dtype = {"binary": "int8", "ubinary": "uint8"}.get(output_type, output_type)
        model = replace(model, output=(*model.output[:-1], width), dtype=np.dtype(dtype))
    _check_columns(source.schema, model, options)
    name = options.output_column or ("context_vectors" if model.text_encoder is None else "embedding")
    fingerprint = _fingerprint(source, model, options)
    job = _digest(json.dumps(fingerprint, sort_keys=True).encode())
    made_by: dict[str | bytes, str] = {"model": model.name, "version": model.version, JOB_KEY: job}
    made_by |= {"digest": model.digest, "pool": str(options.pool)}
    # Rows of passages lack the columns of the whole text.
    dropped = options.text_template.columns if options.layout is PassageLayout.ROWS else ()
    kept = [index for index, column in enumerate(source.schema.names) if column not in dropped]
    schema = pa.schema([source.schema.field(index) for index in kept], source.schema.metadata)
    for column, data_type in _added_columns(model, options, name).items():
        if column in schema.names:
            is_named = column.startswith(name)
            hint = "choose another name with --output-column (output_column)" if is_named else "rename it"
            raise EnrichError(f"the table already has a column {column!r}; {hint}")
        schema = schema.append(pa.field(column, data_type, metadata=made_by))
    return JobPlan(source, model, options, kept, schema, fingerprint)


def _check_model(options: EnrichOptions, model: JobModel) -> None:
    """Checks whether a model has what options of texts ask for."""
    if len(model.output) not in (VECTORS_RANK, POOLED_RANK) or not isinstance(model.output[-1], int):
        axes = ", ".join(map(str, model.output))
        raise EnrichError(
            f"model {model.name!r} has an output of axes ({axes}); enrichment takes (batch, length, width) "
            "or (batch, width) with a fixed width"
        )
    if model.pooled and options.pool is not Pool.NONE:
        raise EnrichError(
            f"model {model.name!r} already returns one vector per sequence: leave out pool={options.pool}"
        )
    if (encoder := model.text_encoder) is None:
        for name in ENCODER_ONLY:
            if getattr(options, name) is not None:
                raise EnrichError(f"{name} needs a text encoder, which model {model.name!r} is not")
        return
    _check_heads(options, model.name, encoder)
    if options.weights:
        raise EnrichError(
            f"model {model.name!r} is a text encoder, whose attention weights are not stored; attend_text of "
            "the client returns them"
        )
    if options.prompt and options.prompt not in encoder.prompts:
        prompts = ", ".join(encoder.prompts) or "no prompts"
        raise EnrichError(f"prompt is {options.prompt!r}; model {model.name!r} has {prompts}")
    allowed = [*encoder.dimensions, model.output_width]
    if options.dimensions is not None and options.dimensions not in allowed:
        numbers = ", ".join(map(str, allowed))
        raise EnrichError(f"dimensions is {options.dimensions}; model {model.name!r} allows {numbers}")
    if options.passage_tokens and model.max_tokens and options.passage_tokens > model.max_tokens:
        raise EnrichError(
            f"passage_tokens is {options.passage_tokens}; model {model.name!r} takes at most "
            f"{model.max_tokens} tokens"
        )


def _check_heads(options: EnrichOptions, model: str, encoder: EncoderInfo) -> None:
    has = {"dense": encoder.embedding_width, "sparse": encoder.sparse_width}
    has["token_vectors"] = encoder.has_token_vectors
    for head in options.heads:
        if not has[head]:
            names = ", ".join(name for name in has if has[name])
            raise EnrichError(
                f"model {model!r} has no {head} output; choose from {names} with --outputs (outputs)"
            )
    for name, head in HEADS.items():
        if getattr(options, name) is not None and head not in options.heads:
            raise EnrichError(f"{name} needs {head} among outputs")


def _check_columns(schema: pa.Schema, model: JobModel, options: EnrichOptions) -> None:
    """Checks whether the table has a column of a fitting type for each input of the model."""
    from_table = [Role.QUERY] if options.context is not None else list(model.input_widths)
    if set(options.columns) != set(from_table):
        takes, roles = ", ".join(from_table), ", ".join(options.columns)
        raise EnrichError(f"model {model.name!r} takes {takes}; columns are given for {roles}")
    columns = list(options.columns.items())
    if model.accepts_text:
        columns = [(Role.QUERY, column) for column in options.text_template.columns]
    for role, column in columns:
        if (count := schema.names.count(column)) > 1:
            raise EnrichError(f"there are {count} columns {column!r}: rename all but one")
        if not count:
            names, purpose = ", ".join(schema.names), "text" if model.accepts_text else role
            raise EnrichError(f"there is no column {column!r} for the {purpose}; the columns are {names}")
        # To read no rows of the column's type raises the error of a type that does not fit.
        none = pa.nulls(0, schema.field(column).type)
        try:
            if model.accepts_text:
                cells.read_texts(none)
            else:
                cells.read_numbers(none, model.input_widths[role])
        except EnrichError as error:
            raise EnrichError(f"column {column!r} {error}") from error


def _added_columns(model: JobModel, options: EnrichOptions, name: str) -> dict[str, pa.DataType]:
    """The new columns, of which `name` has the vectors; those of other heads have its name and theirs."""
    columns: dict[str, pa.DataType] = {}
    for head in options.heads:
        if head == "sparse":
            columns[f"{name}_{head}"] = cells.sparse_type()
        elif head == "token_vectors":
            columns[f"{name}_{head}"] = cells.vectors_type(model.token_width, cells.FLOAT32, pooled=False)
        else:
            pooled = model.pooled or options.pool is not Pool.NONE
            columns[name] = cells.vectors_type(model.output_width, model.dtype, pooled=pooled)
    match options.layout:
        case PassageLayout.ROWS:
            return {"source_row": pa.int64(), **PASSAGE_TYPES, **columns}
        case PassageLayout.LISTS:
            return {key: pa.list_(kind) for key, kind in {**PASSAGE_TYPES, **columns}.items()}
    return {**columns, "attention_weights": cells.weights_type()} if options.weights else columns


def _fingerprint(source: TableSource, model: JobModel, options: EnrichOptions) -> Json:
    """What a resumed job must have in common with the job that it continues."""
    files = [[file.name, file.rows, *file.stamp] for file in source.files]
    values = {name: value for name, value in asdict(options).items() if name not in RUN_OPTIONS}
    if options.context is not None:
        with locate(options.context).open() as file:
            values["context"] = _digest(file.read())
    return values | {
        "files": _digest(json.dumps(files).encode()),
        "schema": _digest(source.schema.serialize().to_pybytes()),
        "model": model.name,
        "version": model.version,
        "model digest": model.digest,
        "chunks": [CHUNK_ROWS, CHUNK_BYTES],
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
