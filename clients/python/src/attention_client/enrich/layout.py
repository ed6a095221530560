"""The columns of the result: which there are, and the rows of a batch with them.

Notation: S sequences of a batch, d elements of a vector.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa

from attention_client.enrich.backend import Array, ModelSpec
from attention_client.enrich.columns import (
    pooled_column,
    vectors_column,
    vectors_type,
    weights_column,
    weights_type,
)
from attention_client.enrich.errors import EnrichError
from attention_client.enrich.inputs import BatchInputs
from attention_client.enrich.options import JobOptions
from attention_client.enrich.pooling import Pool
from attention_client.enrich.tables import rows_per_batch
from attention_client.enrich.text_options import PassageLayout

SOURCE_ROW, PASSAGE = "source_row", "passage"
FLOAT_BYTES = 4
PASSAGE_TYPES = {PASSAGE: pa.string(), "passage_start": pa.int32(), "passage_end": pa.int32()}


@dataclass(frozen=True, eq=False)
class BatchResults:
    """The results of a batch.

    Attributes:
        vectors: For each sequence (T, d), or (d,) if pooled; None if there are none.
        weights: For each sequence (H, Tq, Tk); None if there are none.
        refused: Rows that were refused.
        pooled: Whether there is one vector for each sequence.
    """

    vectors: Sequence[Array | None]
    weights: Sequence[Array | None]
    refused: frozenset[int]
    pooled: bool


def result_schema(
    schema: pa.Schema, model: ModelSpec, options: JobOptions, made_by: Mapping[str | bytes, str]
) -> pa.Schema:
    """The columns of the result.

    Args:
        schema: Columns of the table.
        model: The model.
        options: Options of the job.
        made_by: Metadata of the new columns.

    Raises:
        EnrichError: The table has a column of a new one's name.
    """
    result = pa.schema([schema.field(name) for name in _kept(schema, options)], schema.metadata)
    for name, data_type in _added(model, options).items():
        if name in result.names:
            hint = "choose another name with --output-column (output_column)"
            if name != options.vectors_column(model):
                hint = "rename it"
            raise EnrichError(f"the table already has a column {name!r}; {hint}")
        result = result.append(pa.field(name, data_type, metadata=dict(made_by)))
    return result


def _kept(schema: pa.Schema, options: JobOptions) -> list[str]:
    """Columns of the table that stay. Rows of passages lack those of the whole text."""
    dropped = options.text_template.columns if options.layout is PassageLayout.ROWS else ()
    return [name for name in schema.names if name not in dropped]


def _added(model: ModelSpec, options: JobOptions) -> dict[str, pa.DataType]:
    pooled = model.pooled or options.pool is not Pool.NONE
    name, vectors = options.vectors_column(model), vectors_type(model.output_width, pooled=pooled)
    match options.layout:
        case PassageLayout.ROWS:
            return {SOURCE_ROW: pa.int64(), **PASSAGE_TYPES, name: vectors}
        case PassageLayout.LISTS:
            return {key: pa.list_(kind) for key, kind in {**PASSAGE_TYPES, name: vectors}.items()}
    if options.weights_column:
        return {name: vectors, options.weights_column: weights_type()}
    return {name: vectors}


def enriched(
    inputs: BatchInputs, results: BatchResults, schema: pa.Schema, model: ModelSpec, options: JobOptions
) -> Iterator[pa.RecordBatch]:
    """The rows of the result, in portions of bounded size where rows of the table are repeated."""
    match options.layout:
        case PassageLayout.ROWS:
            yield from _passage_rows(inputs, results, schema, model.output_width)
        case PassageLayout.LISTS:
            yield _passage_lists(inputs, results, schema, model.output_width)
        case _:
            to_column = pooled_column if results.pooled else vectors_column
            added = [to_column(results.vectors, model.output_width)]
            if options.weights_column:
                added.append(weights_column(results.weights))
            yield pa.RecordBatch.from_arrays([*inputs.batch.rows.columns, *added], schema=schema)


def _passage_rows(
    inputs: BatchInputs, results: BatchResults, schema: pa.Schema, width: int
) -> Iterator[pa.RecordBatch]:
    """One row for each passage; one with nulls for a row of the table without passages."""
    first_of_row = np.diff(inputs.rows, prepend=-1) > 0
    present = ~np.isin(inputs.rows, list(results.refused))
    sequences = np.flatnonzero(present | first_of_row)
    table = inputs.batch.rows
    kept = [table.column(name) for name in schema.names if name in table.schema.names]
    # What one row of the result takes decides how many are made at a time.
    size = sum(column.nbytes for column in kept) + table.num_rows * width * FLOAT_BYTES
    step = rows_per_batch(table.num_rows, size)
    for start in range(0, max(len(sequences), 1), step):
        part = sequences[start : start + step]
        rows = inputs.rows[part]
        alive = present[part]
        vectors = [results.vectors[index] if ok else None for index, ok in zip(part, alive, strict=True)]
        columns = [
            *(column.take(pa.array(rows)) for column in kept),
            pa.array(rows + inputs.batch.first, pa.int64()),
            *_passage_columns(inputs, part, alive),
            pooled_column(vectors, width),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _passage_columns(inputs: BatchInputs, sequences: Array, present: Array) -> list[pa.Array]:
    passages = inputs.passages or ()
    found = [passages[index] if ok else None for index, ok in zip(sequences, present, strict=True)]
    return [
        pa.array([None if passage is None else passage[place] for passage in found], kind)
        for place, kind in enumerate(PASSAGE_TYPES.values())
    ]


def _passage_lists(
    inputs: BatchInputs, results: BatchResults, schema: pa.Schema, width: int
) -> pa.RecordBatch:
    """One row for each row of the table, with lists of its passages; null for a row without passages."""
    groups = [
        list(group) for _, group in groupby(range(len(inputs.rows)), key=inputs.rows.tolist().__getitem__)
    ]
    passages = inputs.passages or ()
    lists = [
        None if row in results.refused or passages[group[0]] is None else group
        for row, group in enumerate(groups)
    ]
    present = np.array([index for group in lists if group for index in group], np.int64)
    counts = [0 if group is None else len(group) for group in lists]
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), pa.int32())
    mask = pa.array([group is None for group in lists], pa.bool_())
    values = [
        *_passage_columns(inputs, present, np.ones(len(present), bool)),
        pooled_column([results.vectors[index] for index in present], width),
    ]
    added = [pa.ListArray.from_arrays(offsets, column, mask=mask) for column in values]
    return pa.RecordBatch.from_arrays([*inputs.batch.rows.columns, *added], schema=schema)
