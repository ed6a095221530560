"""Results as columns of a table.

Notation: T rows of a sequence, Tq query rows, Tk key rows, H heads, d elements of a row.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from attention_client.enrich.backend import Array


def vectors_type(width: int, *, pooled: bool) -> pa.DataType:
    """The type of a column of context vectors: (T, d) for each row; (d,) if pooled."""
    row = pa.list_(pa.float32(), width)
    return row if pooled else pa.list_(row)


def weights_type() -> pa.DataType:
    """The type of a column of attention weights: (H, Tq, Tk) for each row."""
    return pa.list_(pa.list_(pa.list_(pa.float32())))


def vectors_column(rows: Sequence[Array | None], width: int) -> pa.Array:
    """(T, d) for each row; None becomes null."""
    lengths = [0 if row is None else len(row) for row in rows]
    present = [row for row in rows if row is not None]
    flat = np.concatenate(present) if present else np.empty((0, width), np.float32)
    values = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel(), pa.float32()), width)
    return pa.ListArray.from_arrays(_offsets(lengths), values, mask=_nulls(rows))


def pooled_column(rows: Sequence[Array | None], width: int) -> pa.Array:
    """(d,) for each row; None becomes null."""
    zeros = np.zeros(width, np.float32)
    flat = np.concatenate([zeros if row is None else row for row in rows]) if rows else zeros[:0]
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.float32()), width, mask=_nulls(rows))


def weights_column(rows: Sequence[Array | None]) -> pa.Array:
    """(H, Tq, Tk) for each row; None becomes null."""
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
