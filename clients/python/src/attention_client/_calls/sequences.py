"""Reads the sequences of an argument and its masks, in each of the forms that a call accepts.

Notation: "..." the leading axes of a batch, T rows of a sequence, d elements of a row; for masks, Tq query
rows, Tk key rows and H heads. Token ids and positions have no d.
"""

import math
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attention_client._calls.arrays import (
    DATA_TYPES,
    as_array,
    as_booleans,
    as_floats,
    as_integers,
    items_of,
    narrow,
)
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import Array, Arrays, Texts, Wire, type_name
from attention_client.errors import invalid

_KINDS = (pb.AttentionMask.KIND_KEYS, pb.AttentionMask.KIND_PAIRS, pb.AttentionMask.KIND_HEADS)
_SHAPES = "(Tk,), (Tq, Tk) or (H, Tq, Tk)"
# The most texts, characters and parts of one request, because servers have limits; calls with more are split.
MAX_SEQUENCES = 1024
MAX_TEXT_CHARACTERS = 4 << 20
MAX_SPANS = 4096


class InputForm(Enum):
    """The form of an argument; the result has the form of the query."""

    SINGLE = "one sequence"
    BATCH = "a batch array"
    LIST = "a list of sequences"


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequences of one argument.

    Attributes:
        field: The argument's name, for errors.
        form: The argument's form.
        leading: Sizes of the axes before T: none for one sequence, those of a batch, (number of sequences,)
            for a list.
        pieces: Arrays that hold the valid rows of all sequences in order: one per sequence, (T_i, d), or, if
            all rows are valid, a single batch, (number of sequences, T, d).
        lengths: Valid rows of each sequence.
        rows: Rows of each sequence as the caller gave it: its length, or more if it is padded.
    """

    field: str
    form: InputForm
    leading: tuple[int, ...]
    pieces: tuple[Array, ...]
    lengths: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def numbers(self) -> list[int]:
        """All valid integers in order, of ids or positions."""
        numbers: list[int] = np.concatenate([piece.ravel() for piece in self.pieces]).tolist()
        return numbers


def vectors(
    field: str, value: Arrays, lengths: ArrayLike | None = None, *, like: InputForm | None = None
) -> Sequences:
    """Reads (T, d), (..., T, d) or a list of (T_i, d) of real numbers.

    Args:
        field: The argument's name, for errors.
        value: The sequences.
        lengths: Valid rows of each sequence of a batch: integers, with the shape of its leading axes.
        like: The form of the query, if another argument is read: nested lists beside an array are an array.

    Raises:
        InvalidArgumentError: An array or a length has another type, rank or size.
    """
    sequences = _read(field, value, lengths, like, as_floats, "(T, d)", rank=2)
    widths = {piece.shape[-1] for piece in sequences.pieces}
    if len(widths) > 1 or 0 in widths:
        raise invalid(field, "rows of one width, 1 or more", f"widths {sorted(widths)}")
    return sequences


def integers(
    field: str, value: Arrays, lengths: ArrayLike | None = None, *, like: InputForm | None = None
) -> Sequences:
    """Reads (T,), (..., T) or a list of (T_i,) integers, token ids or positions; otherwise as `vectors`."""
    return _read(field, value, lengths, like, as_integers, "(T,)", rank=1)


def texts(field: str, value: str | Texts) -> tuple[InputForm, tuple[str, ...]]:
    """Reads one text, or a list, tuple, pandas Series or array of them.

    Raises:
        InvalidArgumentError: The value is neither, it is empty, or an item is not a str.
    """
    if isinstance(value, str):
        return InputForm.SINGLE, (value,)
    items = items_of(value)
    if items is None:
        raise invalid(field, "a str or a list of str", type_name(value))
    for index, text in enumerate(items):
        if not isinstance(text, str):
            raise invalid(f"{field}[{index}]", "a str", type_name(text))
    if not items:
        raise invalid(field, "at least one text", "an empty list")
    return InputForm.LIST, tuple(items)


def split_texts(
    sizes: Sequence[int], spans: Sequence[Array] | None = None, most: int = MAX_TEXT_CHARACTERS
) -> Iterator[slice]:
    """The texts or sequences, by their sizes, in portions of `most` for one request each."""
    start = total = count = 0
    for index, size in enumerate(sizes):
        rows = 0 if spans is None else len(spans[index])
        is_large = total + size > most or count + rows > MAX_SPANS
        if index > start and (is_large or index - start == MAX_SEQUENCES):
            yield slice(start, index)
            start, total, count = index, 0, 0
        total, count = total + size, count + rows
    yield slice(start, len(sizes))


def fill_texts(field: str, target: MutableSequence[str], strings: Sequence[str]) -> None:
    """Adds texts to a repeated field of a message.

    Raises:
        InvalidArgumentError: A text contains a surrogate without its other half.
    """
    try:
        target.extend(strings)
    except UnicodeEncodeError as error:
        raise invalid(field, "text that UTF-8 can encode", error) from None


def _read(
    field: str,
    value: Arrays,
    lengths: ArrayLike | None,
    like: InputForm | None,
    convert: Callable[[str, object], Array],
    shape: str,
    *,
    rank: int,
) -> Sequences:
    """Reads sequences whose arrays `convert` makes; `shape` and `rank` are those of one sequence."""
    items = items_of(value)
    # Whether items are the rows of one sequence, rather than sequences, is seen at the first of them.
    if items is None or like in {InputForm.SINGLE, InputForm.BATCH} or _has_rank(field, items, rank - 1):
        array = convert(field, value if items is None else items)
        if array.ndim < rank:
            raise invalid(field, f"{shape}, (..., {shape[1:]} or a list of {shape}", f"shape {array.shape}")
        leading = array.shape[:-rank]
        if 0 in leading:
            raise invalid(field, "at least one sequence", f"shape {array.shape}")
        rows = (array.shape[-rank],) * math.prod(leading)
        form = InputForm.BATCH if leading else InputForm.SINGLE
        pieces: tuple[Array, ...]
        pieces = (array.reshape(len(rows), *array.shape[-rank:]) if leading else array,)
    else:
        if not items:
            raise invalid(field, "at least one sequence", "an empty list")
        pieces = tuple(convert(f"{field}[{index}]", item) for index, item in enumerate(items))
        for index, piece in enumerate(pieces):
            if piece.ndim != rank:
                actual = f"shape {piece.shape}; each item of a list is one sequence"
                raise invalid(f"{field}[{index}]", shape, actual)
        rows = tuple(len(piece) for piece in pieces)
        form, leading = InputForm.LIST, (len(pieces),)
    if 0 in rows:
        where = f"{field}[{rows.index(0)}]" if len(rows) > 1 else field
        raise invalid(where, "at least one row", "an empty sequence")
    sequences = Sequences(field, form, leading, pieces, rows, rows)
    return sequences if lengths is None else _cut(sequences, lengths)


def _has_rank(field: str, items: Sequence[Any], rank: int) -> bool:
    return bool(items) and as_array(f"{field}[0]", items[0]).ndim == rank


def _cut(sequences: Sequences, lengths: ArrayLike) -> Sequences:
    """Removes the rows of a batch past each sequence's length."""
    if sequences.form is not InputForm.BATCH:
        raise invalid(
            "lengths", "None, because only a batch array has padding", f"lengths for {sequences.form.value}"
        )
    array, leading, rows = as_integers("lengths", lengths), sequences.leading, sequences.rows[0]
    if array.shape != leading:
        raise invalid("lengths", f"shape {leading}, one per sequence", f"shape {array.shape}")
    valid = tuple(array.ravel().tolist())
    if min(valid) < 1 or max(valid) > rows:
        raise invalid("lengths", f"values from 1 to {rows}, the rows given", list(valid))
    (batch,) = sequences.pieces
    pieces = tuple(batch[index, :length] for index, length in enumerate(valid))
    return replace(sequences, pieces=pieces, lengths=valid)


def fill_vectors(message: pb.VectorSequences, sequences: Sequences, wire: Wire) -> None:
    """Fills the message in place, because copying one message into another copies its data again."""
    pieces = [narrow(sequences.field, piece, wire) for piece in sequences.pieces]
    message.data_type = DATA_TYPES[wire]
    message.width = pieces[0].shape[-1]
    message.lengths.extend(sequences.lengths)
    message.data = b"".join(np.ascontiguousarray(piece).data for piece in pieces)


def encode_mask(
    mask: Arrays, form: InputForm, leading: tuple[int, ...], *sequences: Sequences
) -> pb.AttentionMask:
    """Packs the masks of all sequences, eight elements to a byte.

    Args:
        mask: For one sequence (Tk,), (Tq, Tk) or (H, Tq, Tk), True = may attend; for a batch the same after
            its leading axes; for a list a list of masks as for one sequence, all of one rank and one H.
        form: The form of the query, and so of the mask.
        leading: Sizes of the query's leading axes; see Sequences.
        sequences: Those of the query and of the key; none if only the server knows them, as for text.

    Raises:
        InvalidArgumentError: A mask is not boolean, or it has another shape.
    """
    pieces = _split_mask(mask, form, leading)
    for name, piece in pieces.items():
        if not 1 <= piece.ndim <= len(_KINDS):
            raise invalid(name, f"{_SHAPES} for each sequence", f"shape {piece.shape}")
    if len({piece.shape[:-2] if piece.ndim > 1 else None for piece in pieces.values()}) > 1:
        shapes = ", ".join(str(piece.shape) for piece in pieces.values())
        raise invalid("mask", "masks of one rank and one number of heads", f"shapes {shapes}")
    kind = _KINDS[next(iter(pieces.values())).ndim - 1]
    if sequences:
        query, key = sequences
        extents = zip(query.rows, key.rows, query.lengths, key.lengths, strict=True)
        for (name, piece), (*extent, queries, keys) in zip(pieces.items(), extents, strict=True):
            if piece.shape[-2:] != tuple(extent[-piece.ndim :]):  # (Tk,) or (Tq, Tk)
                actual = f"shape {piece.shape}"
                raise invalid(name, f"{_SHAPES} with Tq, Tk = {tuple(extent)}", actual)
            pieces[name] = piece[:keys] if piece.ndim == 1 else piece[..., :queries, :keys]
    bits = np.concatenate([piece.ravel() for piece in pieces.values()])
    return pb.AttentionMask(kind=kind, bits=np.packbits(bits, bitorder="little").tobytes())


def _split_mask(mask: Arrays, form: InputForm, leading: tuple[int, ...]) -> dict[str, NDArray[np.bool_]]:
    """The mask of each sequence, by its name for errors."""
    if form is InputForm.LIST:
        masks = items_of(mask)
        if masks is None:
            raise invalid("mask", "a list of masks, because the query is a list", type_name(mask))
        if len(masks) != leading[0]:
            raise invalid("mask", f"{leading[0]} masks, one per sequence", len(masks))
        return {f"mask[{index}]": as_booleans(f"mask[{index}]", item) for index, item in enumerate(masks)}
    array = as_booleans("mask", mask)
    if array.shape[: len(leading)] != leading:
        raise invalid("mask", f"{_SHAPES} after the query's leading axes {leading}", f"shape {array.shape}")
    return {f"mask{list(index) if index else ''}": array[index] for index in np.ndindex(leading)}
