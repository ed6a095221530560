"""Reads the parts of texts, or of sequences of token ids, that get an embedding each."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attention_client._arrays import as_integers, items_of
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._validation import type_name
from attention_client.errors import invalid

# Start and exclusive end of each part of one text; and those of several texts.
SpanList: TypeAlias = Sequence[tuple[int, int]] | NDArray[Any]
SpanLists: TypeAlias = Sequence[SpanList] | NDArray[Any]
Spans: TypeAlias = NDArray[np.int64]


def read_spans(spans: Any, ends: Sequence[int], unit: str, *, is_one: bool) -> list[Spans]:
    """The spans of each text or sequence, (n, 2).

    Args:
        spans: Pairs of start and end: a list of them for one text, otherwise a list of lists.
        ends: The exclusive upper bound of the spans of each text.
        unit: What they count, for errors.
        is_one: Whether the caller gave one text or sequence, and not a list.

    Raises:
        InvalidArgumentError: They are not integers in pairs, are for more or fewer texts, or one of them is
            empty or reversed or not within its text.
    """
    each = [spans] if is_one else _items(spans)
    if len(each) != len(ends):
        raise invalid("spans", f"one list of spans for each input, {len(ends)}", len(each))
    fields = ["spans"] if is_one else [f"spans[{index}]" for index in range(len(each))]
    return [_read(field, own, end, unit) for field, own, end in zip(fields, each, ends, strict=True)]


def fill(message: pb.Spans, spans: Sequence[Spans]) -> None:
    """Writes the spans of several texts."""
    rows = np.concatenate(spans)
    message.lengths.extend(map(len, spans))
    message.starts.extend(rows[:, 0].tolist())
    message.ends.extend(rows[:, 1].tolist())


def _items(spans: Any) -> Sequence[Any]:
    if isinstance(spans, np.ndarray) and spans.ndim > 1:
        return list(spans)
    items = items_of(spans)
    if items is None:
        raise invalid("spans", "a list of lists of (start, end)", type_name(spans))
    return items


def _read(field: str, spans: ArrayLike, end: int, unit: str) -> Spans:
    rows = np.empty((0, 2), np.int64) if _is_empty(spans) else as_integers(field, spans)
    if rows.shape[1:] != (2,):
        raise invalid(field, "a list of (start, end)", f"shape {rows.shape}")
    (wrong,) = np.nonzero((rows[:, 0] < 0) | (rows[:, 0] >= rows[:, 1]) | (rows[:, 1] > end))
    if wrong.size:
        found = tuple(rows[wrong[0]].tolist())
        expected = f"0 <= start < end <= {end}, the number of {unit}s"
        raise invalid(f"{field}[{wrong[0]}]", expected, found)
    return rows


def _is_empty(spans: object) -> bool:
    return isinstance(spans, list | tuple | np.ndarray) and len(spans) == 0
