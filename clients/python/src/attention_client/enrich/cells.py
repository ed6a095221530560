"""Cells of a column as sequences, for every Arrow type that a column may have; and results as columns.

Notation: R rows of a batch, T rows of a sequence, Tq query rows, Tk key rows, H heads, d elements of a row.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from attention_client._values import Array, SparseVector
from attention_client.enrich.outcome import EnrichError

FLOAT32, INT64 = np.dtype(np.float32), np.dtype(np.int64)
# A weight of a sparse embedding.
WEIGHT = np.dtype([("id", np.uint32), ("weight", np.float32)])


# For each of the R rows its sequence, (T, d) float32 or (T,) int64, or None if the cell is null or refused;
# and the reason for people, for each row whose cell is not null and holds no sequence.
Cells: TypeAlias = tuple[list[Any], dict[int, str]]


def read_numbers(column: pa.Array, width: int | None) -> Cells:
    """Reads vectors, or token ids.

    Vectors are lists of lists of d numbers, flat lists of T x d numbers, or tensors of fixed shape (T, d).
    Lists may be of any Arrow list type, of fixed size or not.

    Args:
        column: The cells of a batch.
        width: d; None for token ids, which are lists of integers.

    Raises:
        EnrichError: The type of the column does not fit, for any of its rows.
    """
    if pa.types.is_null(column.type):
        return [None] * len(column), {}
    return _read_ids(column) if width is None else _read_vectors(column, width)


def _read_vectors(column: pa.Array, width: int) -> Cells:
    _check_tensor(column.type, width)
    column = _storage(column)
    inner: Any = column.type.value_type if _is_list(column.type) else None
    if _is_list(inner) and _is_number(inner.value_type):
        vectors, first, last = _lists(column)
        numbers, starts, ends = _lists(vectors)
        wrong = _of_wrong_width(vectors, ends - starts, first, last, width)
        edges = np.append(starts, len(numbers))
        starts, ends = edges[first], edges[last]
    elif _is_number(inner):
        numbers, starts, ends = _lists(column)
        wrong = {
            row: f"it holds {ends[row] - starts[row]} numbers, not a multiple of {width}, the model's width"
            for row in np.flatnonzero((ends - starts) % width).tolist()
        }
    else:
        raise EnrichError(f"is {column.type}; vectors are lists of numbers, or lists of lists of numbers")
    values, refused = _cells(column, starts, ends, *_numbers(numbers, FLOAT32), wrong)
    return [None if value is None else value.reshape(-1, width) for value in values], refused


def _of_wrong_width(vectors: pa.Array, sizes: Array, first: Array, last: Array, width: int) -> dict[int, str]:
    """The rows some of whose vectors are null or of another width, each with the reason."""
    sizes = np.where(np.asarray(vectors.is_null()), -1, sizes)
    refused: dict[int, str] = {}
    if (sizes == width).all():
        return refused
    for row, (start, end) in enumerate(zip(first, last, strict=True)):
        widths = set(sizes[start:end].tolist())
        if widths - {width}:
            counts = ", ".join(sorted("null" if size < 0 else str(size) for size in widths))
            refused[row] = f"its vectors have {counts} numbers; the model takes {width}"
    return refused


def _read_ids(column: pa.Array) -> Cells:
    column = _storage(column)
    if not (_is_list(column.type) and pa.types.is_integer(column.type.value_type)):
        raise EnrichError(f"is {column.type}; token ids are lists of integers")
    content, starts, ends = _lists(column)
    return _cells(column, starts, ends, *_numbers(content, INT64), {})


def read_texts(column: pa.Array) -> tuple[list[str | None], dict[int, str]]:
    """Reads texts: strings, also in dictionaries (categories) and run-end encoded.

    Raises:
        EnrichError: The column has another type.
    """
    kind = column.type
    while isinstance(kind, pa.DictionaryType | pa.RunEndEncodedType):
        kind = kind.value_type
    if kind not in (pa.null(), pa.string(), pa.large_string(), pa.string_view()):
        raise EnrichError(f"is {column.type}; the model takes strings")
    texts: list[str | None] = []
    refused: dict[int, str] = {}
    for row, scalar in enumerate(column):
        try:
            texts.append(scalar.as_py())
        except UnicodeDecodeError as error:
            texts.append(None)
            refused[row] = f"it is not UTF-8: {error.reason} at byte {error.start}"
    return texts, refused


def _check_tensor(data_type: pa.DataType, width: int) -> None:
    if not isinstance(data_type, pa.FixedShapeTensorType):
        return
    if data_type.permutation not in (None, sorted(data_type.permutation or ())):
        raise EnrichError(
            f"is a tensor whose axes are permuted, {data_type.permutation}: store its rows in order"
        )
    if data_type.shape[-1] != width:
        raise EnrichError(f"holds tensors of shape {data_type.shape}; the model takes vectors of {width}")


def _cells(
    column: pa.Array, starts: Array, ends: Array, flat: Array, holes: Array, refused: dict[int, str]
) -> Cells:
    """Views of `flat`, one per cell; `holes` are the sorted positions that hold no usable number."""
    valid = np.asarray(column.is_valid())
    values: list[Any] = []
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if not valid[index] or index in refused:
            values.append(None)
        elif len(holes) and np.searchsorted(holes, start) != np.searchsorted(holes, end):
            values.append(None)
            refused[index] = f"it holds a null, or a number outside the range of {flat.dtype}"
        else:
            values.append(flat[start:end])
    return values, refused


def _numbers(values: pa.Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """The numbers as `dtype`, and the positions of nulls and of numbers outside its range."""
    holes = np.flatnonzero(np.asarray(values.is_null())) if values.null_count else np.empty(0, np.int64)
    numbers = np.asarray(values.fill_null(0) if values.null_count else values)
    with np.errstate(over="ignore"):
        flat = numbers.astype(dtype, copy=False)
    if numbers.dtype == np.float64 and not np.isfinite(flat).all():
        holes = np.union1d(holes, np.flatnonzero(np.isinf(flat) & ~np.isinf(numbers)))
    if numbers.dtype == np.uint64 and dtype == INT64:
        holes = np.union1d(holes, np.flatnonzero(flat < 0))
    return flat, holes


def _lists(column: pa.Array) -> tuple[pa.Array, Array, Array]:
    """The elements of all lists, and the start and end of each list among them; a null is empty."""
    sizes = np.asarray(pc.list_value_length(column).fill_null(0)).astype(np.int64)
    ends = np.cumsum(sizes)
    return column.flatten(), ends - sizes, ends


def _storage(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _is_list(data_type: pa.DataType | None) -> bool:
    return isinstance(data_type, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def _is_number(data_type: pa.DataType | None) -> bool:
    return data_type is not None and bool(pa.types.is_floating(data_type) or pa.types.is_integer(data_type))


def vectors_type(width: int, dtype: np.dtype[Any], *, pooled: bool) -> pa.DataType:
    """The type of a column of context vectors: (T, d) for each row; (d,) if pooled."""
    row = pa.list_(pa.from_numpy_dtype(dtype), width)
    return row if pooled else pa.list_(row)


def weights_type() -> pa.DataType:
    """The type of a column of attention weights: (H, Tq, Tk) for each row."""
    return pa.list_(pa.list_(pa.list_(pa.float32())))


def vectors_column(rows: Sequence[Array | None], width: int, dtype: np.dtype[Any]) -> pa.Array:
    """(T, d) for each row; None becomes null."""
    present = [row for row in rows if row is not None]
    flat = np.concatenate(present) if present else np.empty((0, width), dtype)
    values = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), width)
    return list_column([None if row is None else len(row) for row in rows], values)


def pooled_column(rows: Sequence[Array | None], width: int, dtype: np.dtype[Any]) -> pa.Array:
    """(d,) for each row; None becomes null."""
    zeros = np.zeros(width, dtype)
    flat = np.concatenate([zeros if row is None else row for row in rows]) if rows else zeros[:0]
    nulls = pa.array([row is None for row in rows], pa.bool_())
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), width, mask=nulls)


def weights_column(rows: Sequence[Array | None]) -> pa.Array:
    """(H, Tq, Tk) for each row; None becomes null."""
    present = [row for row in rows if row is not None]
    flat = np.concatenate([row.ravel() for row in present]) if present else np.empty(0, np.float32)
    keys = [row.shape[2] for row in present for _ in range(row.shape[0] * row.shape[1])]
    queries = [row.shape[1] for row in present for _ in range(row.shape[0])]
    values = list_column(queries, list_column(keys, pa.array(flat, pa.float32())))
    return list_column([None if row is None else len(row) for row in rows], values)


def sparse_type() -> pa.DataType:
    """The type of a column of sparse embeddings: token ids and weights for each row."""
    return pa.list_(pa.struct({name: pa.from_numpy_dtype(WEIGHT[name]) for name in WEIGHT.names or ()}))


def sparse_row(vector: SparseVector) -> Array:
    """A sparse embedding as WEIGHT (n,)."""
    row = np.empty(len(vector.indices), WEIGHT)
    row["id"], row["weight"] = vector.indices, vector.values
    return row


def sparse_column(rows: Sequence[Array | None]) -> pa.Array:
    """WEIGHT (n,) for each row; None becomes null."""
    flat = np.concatenate([np.empty(0, WEIGHT), *(row for row in rows if row is not None)])
    names = WEIGHT.names or ()
    values = pa.StructArray.from_arrays([pa.array(flat[name].copy()) for name in names], names)
    return list_column([None if row is None else len(row) for row in rows], values)


def list_column(lengths: Sequence[int | None], values: pa.Array) -> pa.Array:
    """A list of consecutive values for each row; a length of None becomes null."""
    ends = np.cumsum([length or 0 for length in lengths], dtype=np.int64)
    nulls = pa.array([length is None for length in lengths], pa.bool_())
    offsets = pa.array(np.concatenate([[0], ends]), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, mask=nulls)
