"""Cells of a table as sequences, and results as columns: changes with the kinds of column that are read.

Notation: R rows of a batch, T rows of one sequence, d elements of a row.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from attention_client._values import Array
from attention_client.enrich.errors import EnrichError

HOLE = "holds a null, or a number that float32 cannot hold"


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The sequences of one column of a batch.

    Attributes:
        values: For each row of the batch its sequence, (T, d) float32 or (T,) int64, or its text; None where
            the cell is null or refused.
        refused: By row, why a cell that is not null holds no sequence.
    """

    values: list[Any]
    refused: dict[int, str]


def read_vectors(column: pa.Array, width: int) -> Cells:
    """Reads cells of vectors: lists of lists of d numbers, or flat lists of T x d numbers, row by row.

    Any list type of Arrow will do, of fixed size or not, and so does a tensor of fixed shape.

    Args:
        column: The cells of a batch.
        width: d.

    Raises:
        EnrichError: The column is of another type.
    """
    column = _storage(column)
    inner: Any = column.type.value_type if _is_list(column.type) else None
    if _is_list(inner) and _is_number(inner.value_type):
        return _nested(column, width)
    if _is_number(inner):
        return _flat(column, width)
    raise EnrichError(f"is {column.type}; vectors are lists of numbers, or lists of lists of them")


def read_ids(column: pa.Array) -> Cells:
    """Reads cells of token ids: lists of integers.

    Raises:
        EnrichError: The column is of another type.
    """
    column = _storage(column)
    if not (_is_list(column.type) and pa.types.is_integer(column.type.value_type)):
        raise EnrichError(f"is {column.type}; token ids are lists of integers")
    content, starts, ends = _content(column)
    flat, holes = _numbers(content, np.dtype(np.int64))
    return _cells(column, starts, ends, flat, holes, {})


def read_texts(column: pa.Array) -> Cells:
    """Reads cells of text.

    Raises:
        EnrichError: The column is of another type.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise EnrichError(f"is {kind}; the model takes strings")
    return Cells(column.to_pylist(), {})


def _nested(column: pa.Array, width: int) -> Cells:
    """Lists of lists. Inner lists of another width, and nulls among them, spoil their own cell only."""
    inner, starts, ends = _content(column)
    numbers, inner_starts, inner_ends = _content(inner)
    if inner.null_count or (inner_ends - inner_starts != width).any():
        return _one_by_one(column, width)
    flat, holes = _numbers(numbers, np.dtype(np.float32))
    return _cells(column, starts, ends, flat.reshape(-1, width), np.unique(holes // width), {})


def _one_by_one(column: pa.Array, width: int) -> Cells:
    """Cells of a batch that has some of another shape."""
    values: list[Any] = []
    refused: dict[int, str] = {}
    for index, cell in enumerate(column):
        values.append(None)
        if not cell.is_valid:
            continue
        rows = cell.as_py()
        widths = {None if row is None else len(row) for row in rows}
        if widths - {width}:
            found = sorted("null" if found is None else str(found) for found in widths)
            refused[index] = f"rows are {', '.join(found)} wide; the model takes {width}"
            continue
        flat, holes = _numbers(
            pa.array(itertools.chain.from_iterable(rows), pa.float64()), np.dtype(np.float32)
        )
        if len(holes):
            refused[index] = HOLE
        else:
            values[-1] = flat.reshape(-1, width)
    return Cells(values, refused)


def _flat(column: pa.Array, width: int) -> Cells:
    content, starts, ends = _content(column)
    flat, holes = _numbers(content, np.dtype(np.float32))
    sizes = ends - starts
    wrong = {
        int(index): f"holds {sizes[index]} numbers, which is no multiple of {width}, the model's width"
        for index in np.flatnonzero(sizes % width)
        if column[int(index)].is_valid
    }
    cells = _cells(column, starts, ends, flat, holes, wrong)
    return Cells([None if cell is None else cell.reshape(-1, width) for cell in cells.values], cells.refused)


def _cells(
    column: pa.Array,
    starts: Array,
    ends: Array,
    flat: Array,
    holes: Array,
    refused: dict[int, str],
) -> Cells:
    """Views of the values of all cells; `holes` are the places that hold no number."""
    valid = np.asarray(column.is_valid())
    values: list[Any] = []
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if not valid[index] or index in refused:
            values.append(None)
        elif len(holes) and np.searchsorted(holes, start) != np.searchsorted(holes, end):
            values.append(None)
            refused[index] = HOLE
        else:
            values.append(flat[start:end])
    return Cells(values, refused)


def _numbers(values: pa.Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Numbers of one type, and where among them is a null, or one that the type cannot hold."""
    holes = np.flatnonzero(np.asarray(values.is_null())) if values.null_count else np.empty(0, np.int64)
    given = np.asarray(values.fill_null(0) if values.null_count else values)
    with np.errstate(over="ignore"):
        flat = given.astype(dtype, copy=False)
    if given.dtype == np.float64 and not np.isfinite(flat).all():
        holes = np.union1d(holes, np.flatnonzero(np.isinf(flat) & ~np.isinf(given)))
    return flat, holes


def _content(column: pa.Array) -> tuple[pa.Array, Array, Array]:
    """What the lists of a column hold, and where in it each begins and ends; no more than is theirs."""
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        starts = np.arange(len(column), dtype=np.int64) * kind.list_size
        first = column.offset * kind.list_size
        return column.values[first : first + len(column) * kind.list_size], starts, starts + kind.list_size
    offsets = np.asarray(column.offsets).astype(np.int64, copy=False)
    return (
        column.values[int(offsets[0]) : int(offsets[-1])],
        offsets[:-1] - offsets[0],
        offsets[1:] - offsets[0],
    )


def _storage(column: pa.Array) -> pa.Array:
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType) and kind.permutation not in (None, sorted(kind.permutation)):
        raise EnrichError(f"is a tensor whose axes are permuted, {kind.permutation}: store its rows in order")
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _is_list(kind: pa.DataType | None) -> bool:
    return isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def _is_number(kind: pa.DataType | None) -> bool:
    return kind is not None and bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def vectors_type(width: int, *, pooled: bool) -> pa.DataType:
    """The type of a column of context vectors: (T, d) for each row, or (d,)."""
    row = pa.list_(pa.float32(), width)
    return row if pooled else pa.list_(row)


def weights_type() -> pa.DataType:
    """The type of a column of attention weights: (H, Tq, Tk) for each row."""
    return pa.list_(pa.list_(pa.list_(pa.float32())))


def vectors_column(rows: Sequence[Array | None], width: int) -> pa.Array:
    """(T, d) for each row; null where there is none."""
    lengths = [0 if row is None else len(row) for row in rows]
    present = [row for row in rows if row is not None]
    flat = np.concatenate(present) if present else np.empty((0, width), np.float32)
    values = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel(), pa.float32()), width)
    return pa.ListArray.from_arrays(_offsets(lengths), values, mask=_nulls(rows))


def pooled_column(rows: Sequence[Array | None], width: int) -> pa.Array:
    """(d,) for each row; null where there is none."""
    zeros = np.zeros(width, np.float32)
    flat = np.concatenate([zeros if row is None else row for row in rows]) if rows else zeros[:0]
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.float32()), width, mask=_nulls(rows))


def weights_column(rows: Sequence[Array | None]) -> pa.Array:
    """(H, Tq, Tk) for each row; null where there is none."""
    present = [row for row in rows if row is not None]
    flat = np.concatenate([row.ravel() for row in present]) if present else np.empty(0, np.float32)
    keys = [row.shape[2] for row in present for _ in range(row.shape[0] * row.shape[1])]
    queries = [row.shape[1] for row in present for _ in range(row.shape[0])]
    heads = [0 if row is None else len(row) for row in rows]
    innermost = pa.ListArray.from_arrays(_offsets(keys), pa.array(flat, pa.float32()))
    middle = pa.ListArray.from_arrays(_offsets(queries), innermost)
    return pa.ListArray.from_arrays(_offsets(heads), middle, mask=_nulls(rows))


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pa.int32())


def _nulls(rows: Sequence[Array | None]) -> pa.Array:
    return pa.array([row is None for row in rows], pa.bool_())
