"""Cells of a column as sequences: every Arrow type that a column may have.

Notation: R rows of a batch, T rows of one sequence, d elements of a row.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from attention_client.enrich.backend import Array
from attention_client.enrich.errors import EnrichError

FLOAT32, INT64 = np.dtype(np.float32), np.dtype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The sequences of one column of a batch.

    Attributes:
        values: For each of the R rows its sequence, (T, d) float32 or (T,) int64, or its text; None if the
            cell is null or refused.
        refused: For each row whose cell is not null and holds no sequence, the reason for people.
    """

    values: list[Any]
    refused: dict[int, str]


def read_vectors(column: pa.Array, width: int) -> Cells:
    """Reads vectors: lists of lists of d numbers, flat lists of T x d numbers, tensors of fixed shape (T, d).

    Lists may be of any Arrow list type, of fixed size or not.

    Args:
        column: The cells of a batch.
        width: d.

    Raises:
        EnrichError: The type of the column does not fit, for any of its rows.
    """
    _check_tensor(column.type, width)
    column = _storage(column)
    inner: Any = column.type.value_type if _is_list(column.type) else None
    if _is_list(inner) and _is_number(inner.value_type):
        _check_fixed(inner, width, is_flat=False)
        return _read_nested(column, width)
    if _is_number(inner):
        _check_fixed(column.type, width, is_flat=True)
        return _read_flat(column, width)
    raise EnrichError(f"is {column.type}; vectors are lists of numbers, or lists of lists of numbers")


def read_ids(column: pa.Array) -> Cells:
    """Reads token ids: lists of integers.

    Raises:
        EnrichError: The column has another type.
    """
    column = _storage(column)
    if not (_is_list(column.type) and pa.types.is_integer(column.type.value_type)):
        raise EnrichError(f"is {column.type}; token ids are lists of integers")
    content, starts, ends = _content(column)
    flat, holes = _numbers(content, INT64)
    return _cells(column, starts, ends, flat, holes, {})


def read_texts(column: pa.Array) -> Cells:
    """Reads texts.

    Raises:
        EnrichError: The column has another type.
    """
    if pa.types.is_null(column.type):
        return Cells([None] * len(column), {})
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    found = column.type
    if not (pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found)):
        raise EnrichError(f"is {found}; the model takes strings")
    return Cells(column.to_pylist(), {})


def check_widths(column: pa.Array, width: int) -> None:
    """Refuses a column of vectors if none of its rows has vectors of the model's width.

    Raises:
        EnrichError: At least one row holds vectors, and all of them are of other widths.
    """
    column = _storage(column)
    if pa.types.is_null(column.type) or pa.types.is_null(column.type.value_type):
        return
    content, starts, ends = _content(column.drop_null())
    if _is_list(column.type.value_type):
        _, inner_starts, inner_ends = _content(content.drop_null())
        widths = np.unique(inner_ends - inner_starts)
        if len(widths) and width not in widths:
            found = ", ".join(map(str, widths.tolist()))
            raise EnrichError(f"holds vectors of {found} numbers; the model takes vectors of {width}")
    else:
        sizes = np.unique(ends - starts)
        if sizes.any() and (sizes[sizes > 0] % width).all():
            found = ", ".join(map(str, sizes[sizes > 0].tolist()))
            raise EnrichError(f"holds lists of {found} numbers; the model takes multiples of {width}")


def _check_tensor(data_type: pa.DataType, width: int) -> None:
    if not isinstance(data_type, pa.FixedShapeTensorType):
        return
    if data_type.permutation not in (None, sorted(data_type.permutation or ())):
        raise EnrichError(
            f"is a tensor whose axes are permuted, {data_type.permutation}: store its rows in order"
        )
    if data_type.shape[-1] != width:
        raise EnrichError(f"holds tensors of shape {data_type.shape}; the model takes vectors of {width}")


def _check_fixed(data_type: pa.DataType, width: int, *, is_flat: bool) -> None:
    """Refuses lists of a fixed size that no row can fit."""
    if not pa.types.is_fixed_size_list(data_type):
        return
    size = data_type.list_size
    if is_flat and size % width:
        raise EnrichError(f"holds lists of {size} numbers; the model takes multiples of {width}")
    if not is_flat and size != width:
        raise EnrichError(f"holds vectors of {size} numbers; the model takes vectors of {width}")


def _read_nested(column: pa.Array, width: int) -> Cells:
    """Lists of lists. Inner lists that are null or of another width make only their own cell invalid."""
    inner, starts, ends = _content(column)
    numbers, inner_starts, inner_ends = _content(inner)
    if inner.null_count or (inner_ends - inner_starts != width).any():
        return _read_each(column, width)
    flat, holes = _numbers(numbers, FLOAT32)
    return _cells(column, starts, ends, flat.reshape(-1, width), np.unique(holes // width), {})


def _read_each(column: pa.Array, width: int) -> Cells:
    """Cells of a batch of which some have another shape; slower."""
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
            refused[index] = f"its vectors have {', '.join(found)} numbers; the model takes {width}"
            continue
        flat, holes = _numbers(pa.array(itertools.chain.from_iterable(rows), pa.float64()), FLOAT32)
        if len(holes):
            refused[index] = _hole(FLOAT32)
        else:
            values[-1] = flat.reshape(-1, width)
    return Cells(values, refused)


def _read_flat(column: pa.Array, width: int) -> Cells:
    content, starts, ends = _content(column)
    flat, holes = _numbers(content, FLOAT32)
    sizes = ends - starts
    wrong = {
        int(index): f"it holds {sizes[index]} numbers, not a multiple of {width}, the model's width"
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
    """Views of `flat`, one per cell; `holes` are the sorted positions that hold no usable number."""
    valid = np.asarray(column.is_valid())
    values: list[Any] = []
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if not valid[index] or index in refused:
            values.append(None)
        elif len(holes) and np.searchsorted(holes, start) != np.searchsorted(holes, end):
            values.append(None)
            refused[index] = _hole(flat.dtype)
        else:
            values.append(flat[start:end])
    return Cells(values, refused)


def _hole(dtype: np.dtype[Any]) -> str:
    return f"it holds a null, or a number outside the range of {dtype}"


def _numbers(values: pa.Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """The numbers as `dtype`, and the positions of nulls and of numbers outside its range."""
    holes = np.flatnonzero(np.asarray(values.is_null())) if values.null_count else np.empty(0, np.int64)
    given = np.asarray(values.fill_null(0) if values.null_count else values)
    with np.errstate(over="ignore"):
        flat = given.astype(dtype, copy=False)
    if given.dtype == np.float64 and not np.isfinite(flat).all():
        holes = np.union1d(holes, np.flatnonzero(np.isinf(flat) & ~np.isinf(given)))
    if given.dtype == np.uint64 and dtype == INT64:
        holes = np.union1d(holes, np.flatnonzero(flat < 0))
    return flat, holes


def _content(column: pa.Array) -> tuple[pa.Array, Array, Array]:
    """The elements of all lists of a column, and the start and end of each list among them."""
    data_type = column.type
    if pa.types.is_fixed_size_list(data_type):
        starts = np.arange(len(column), dtype=np.int64) * data_type.list_size
        first = column.offset * data_type.list_size
        last = first + len(column) * data_type.list_size
        return column.values[first:last], starts, starts + data_type.list_size
    offsets = np.asarray(column.offsets).astype(np.int64, copy=False)
    return (
        column.values[int(offsets[0]) : int(offsets[-1])],
        offsets[:-1] - offsets[0],
        offsets[1:] - offsets[0],
    )


def _storage(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _is_list(data_type: pa.DataType | None) -> bool:
    return isinstance(data_type, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def _is_number(data_type: pa.DataType | None) -> bool:
    return data_type is not None and bool(pa.types.is_floating(data_type) or pa.types.is_integer(data_type))
