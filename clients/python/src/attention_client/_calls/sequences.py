"""Reads the sequences of an argument and its masks, in each of the forms that a call accepts.

Notation: "..." the leading axes of a batch, T rows of a sequence, d elements of a row; for masks, Tq query
rows, Tk key rows and H heads. Token ids and positions have no d.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attention_client._calls.arrays import as_array, as_booleans, as_floats, as_integers, items_of
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import Array, Arrays, Texts, type_name
from attention_client.errors import invalid

_Mask: TypeAlias = NDArray[np.bool_]
_Extent: TypeAlias = tuple[int, int]  # (Tq, Tk)
_KINDS = (pb.AttentionMask.KIND_KEYS, pb.AttentionMask.KIND_PAIRS, pb.AttentionMask.KIND_HEADS)
_SHAPES = "(Tk,), (Tq, Tk) or (H, Tq, Tk)"


@dataclass(frozen=True, slots=True)
class _RowType:
    """The type of an argument's rows: the rank of one sequence, its conversion, and its shapes in words."""

    rank: int
    convert: Callable[[str, object], Array]
    one: str
    batch: str


_VECTORS = _RowType(rank=2, convert=as_floats, one="(T, d)", batch="(..., T, d)")
_INTEGERS = _RowType(rank=1, convert=as_integers, one="(T,)", batch="(..., T)")


class InputForm(Enum):
    """The form of an argument; the result has the form of the query."""

    ONE = "one sequence"
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
    def width(self) -> int:
        """Elements of a row: d."""
        return int(self.pieces[0].shape[-1])

    @property
    def flat(self) -> bytes:
        """All valid elements in order, copied once."""
        if len(self.pieces) == 1:
            return self.pieces[0].tobytes()
        return b"".join(np.ascontiguousarray(piece).data for piece in self.pieces)

    @property
    def numbers(self) -> list[int]:
        """All valid integers in order, of ids or positions."""
        flat: list[int] = np.concatenate([piece.ravel() for piece in self.pieces]).tolist()
        return flat


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
    sequences = _read(field, value, _VECTORS, like)
    widths = {piece.shape[-1] for piece in sequences.pieces}
    if len(widths) > 1 or 0 in widths:
        raise invalid(field, "rows of one width, 1 or more", f"widths {sorted(widths)}")
    return _cut(sequences, lengths)


def integers(
    field: str, value: Arrays, lengths: ArrayLike | None = None, *, like: InputForm | None = None
) -> Sequences:
    """Reads (T,), (..., T) or a list of (T_i,) integers, token ids or positions; otherwise as `vectors`."""
    return _cut(_read(field, value, _INTEGERS, like), lengths)


def texts(field: str, value: str | Texts) -> tuple[InputForm, tuple[str, ...]]:
    """Reads one text, or a list, tuple, pandas Series or array of them.

    Raises:
        InvalidArgumentError: The value is neither, it is empty, or an item is not a str.
    """
    if isinstance(value, str):
        return InputForm.ONE, (value,)
    items = items_of(value)
    if items is None:
        raise invalid(field, "a str or a list of str", type_name(value))
    for index, text in enumerate(items):
        if not isinstance(text, str):
            raise invalid(f"{field}[{index}]", "a str", type_name(text))
    if not items:
        raise invalid(field, "at least one text", "an empty list")
    return InputForm.LIST, tuple(items)


def _read(field: str, value: Arrays, rows: _RowType, like: InputForm | None) -> Sequences:
    items = items_of(value)
    if items is None:
        return _read_array(field, rows.convert(field, value), rows)
    if like in {InputForm.ONE, InputForm.BATCH} or _are_rows(field, items, rows):
        return _read_array(field, rows.convert(field, items), rows)
    return _read_list(field, items, rows)


def _are_rows(field: str, items: Sequence[Any], rows: _RowType) -> bool:
    """Whether items are the rows of one sequence, rather than sequences; the first one decides."""
    return bool(items) and as_array(f"{field}[0]", items[0]).ndim == rows.rank - 1


def _read_array(field: str, array: Array, rows: _RowType) -> Sequences:
    if array.ndim < rows.rank:
        raise invalid(field, f"{rows.one}, {rows.batch} or a list of {rows.one}", f"shape {array.shape}")
    leading, own = array.shape[: -rows.rank], array.shape[-rows.rank :]
    if 0 in leading:
        raise invalid(field, "at least one sequence", f"shape {array.shape}")
    count = math.prod(leading)
    lengths = (int(own[0]),) * count
    _refuse_empty(field, lengths)
    if not leading:
        return Sequences(field, InputForm.ONE, leading, (array,), lengths, lengths)
    return Sequences(field, InputForm.BATCH, leading, (array.reshape(count, *own),), lengths, lengths)


def _read_list(field: str, value: Sequence[Any], rows: _RowType) -> Sequences:
    pieces = tuple(rows.convert(f"{field}[{index}]", item) for index, item in enumerate(value))
    for index, piece in enumerate(pieces):
        if piece.ndim != rows.rank:
            found = f"shape {piece.shape}; each item of a list is one sequence"
            raise invalid(f"{field}[{index}]", rows.one, found)
    lengths = tuple(int(piece.shape[0]) for piece in pieces)
    _refuse_empty(field, lengths)
    return Sequences(field, InputForm.LIST, (len(pieces),), pieces, lengths, lengths)


def _cut(sequences: Sequences, lengths: ArrayLike | None) -> Sequences:
    """Removes the rows of a batch past each sequence's length."""
    if lengths is None:
        return sequences
    if sequences.form is not InputForm.BATCH:
        raise invalid(
            "lengths", "None, because only a batch array has padding", f"lengths for {sequences.form.value}"
        )
    valid = _read_lengths(lengths, sequences.leading, sequences.rows[0])
    (batch,) = sequences.pieces
    pieces = tuple(batch[index, :length] for index, length in enumerate(valid))
    return replace(sequences, pieces=pieces, lengths=valid)


def _read_lengths(lengths: ArrayLike, leading: tuple[int, ...], rows: int) -> tuple[int, ...]:
    array = as_integers("lengths", lengths)
    if array.shape != leading:
        raise invalid("lengths", f"shape {leading}, one per sequence", f"shape {array.shape}")
    valid = tuple(int(length) for length in array.flat)
    if min(valid) < 1 or max(valid) > rows:
        raise invalid("lengths", f"values from 1 to {rows}, the rows given", list(valid))
    return valid


def _refuse_empty(field: str, rows: tuple[int, ...]) -> None:
    if not rows:
        raise invalid(field, "at least one sequence", "an empty list")
    if 0 in rows:
        where = f"{field}[{rows.index(0)}]" if len(rows) > 1 else field
        raise invalid(where, "at least one row", "an empty sequence")


def encode_mask(
    mask: Arrays,
    form: InputForm,
    leading: tuple[int, ...],
    *,
    given: Iterable[_Extent] | None = None,
    valid: Iterable[_Extent] | None = None,
) -> pb.AttentionMask:
    """Packs the masks of all sequences, eight elements to a byte.

    Args:
        mask: For one sequence (Tk,), (Tq, Tk) or (H, Tq, Tk), True = may attend; for a batch the same after
            its leading axes; for a list a list of masks as for one sequence, all of one rank and one H.
        form: The form of the query, and so of the mask.
        leading: Sizes of the query's leading axes; see Sequences.
        given: (Tq, Tk) of each sequence as the caller gave it, including padding; None if only the server
            knows, as for text.
        valid: (Tq, Tk) of each sequence as it is sent.

    Raises:
        InvalidArgumentError: A mask is not boolean, or it has another shape.
    """
    pieces = _per_sequence(mask, form, leading)
    spread = {piece.shape[:-2] if piece.ndim > 1 else None for _, piece in pieces}  # None, () or (H,)
    if len(spread) != 1:
        found = ", ".join(str(piece.shape) for _, piece in pieces)
        raise invalid("mask", "masks of one rank and one number of heads", f"shapes {found}")
    if given is None or valid is None:
        cut = [piece.ravel() for _, piece in pieces]
    else:
        cut = [
            _cut_mask(name, piece, rows, lengths)
            for (name, piece), rows, lengths in zip(pieces, given, valid, strict=True)
        ]
    bits = np.concatenate(cut) if len(cut) > 1 else cut[0]
    kind = _KINDS[pieces[0][1].ndim - 1]
    return pb.AttentionMask(kind=kind, bits=np.packbits(bits, bitorder="little").tobytes())


def _per_sequence(mask: Arrays, form: InputForm, leading: tuple[int, ...]) -> list[tuple[str, _Mask]]:
    """One mask per sequence, each with its name for errors."""
    if form is InputForm.LIST:
        return _from_list(mask, leading[0])
    array = as_booleans("mask", mask)
    if array.shape[: len(leading)] != leading:
        raise invalid("mask", f"{_SHAPES} after the query's leading axes {leading}", f"shape {array.shape}")
    _check_rank("mask", array, leading)
    own = array.shape[len(leading) :]  # (Tk,), (Tq, Tk) or (H, Tq, Tk)
    names = [f"mask{list(index) if index else ''}" for index in np.ndindex(leading)]
    return list(zip(names, array.reshape(len(names), *own), strict=True))


def _from_list(mask: Arrays, count: int) -> list[tuple[str, _Mask]]:
    masks = items_of(mask)
    if masks is None:
        raise invalid("mask", "a list of masks, because the query is a list", type_name(mask))
    if len(masks) != count:
        raise invalid("mask", f"{count} masks, one per sequence", len(masks))
    pieces = [(f"mask[{index}]", as_booleans(f"mask[{index}]", item)) for index, item in enumerate(masks)]
    for name, piece in pieces:
        _check_rank(name, piece)
    return pieces


def _check_rank(name: str, mask: _Mask, leading: tuple[int, ...] = ()) -> None:
    if not 1 <= mask.ndim - len(leading) <= len(_KINDS):
        raise invalid(name, f"{_SHAPES} for each sequence", f"shape {mask.shape}")


def _cut_mask(name: str, mask: _Mask, given: _Extent, valid: _Extent) -> _Mask:
    """Checks a mask's shape and returns the elements of its valid rows and columns, flat."""
    own = given[-mask.ndim :]  # (Tk,) for the first rank, (Tq, Tk) for the others
    if mask.shape[-len(own) :] != own:
        raise invalid(name, f"{_SHAPES} with Tq, Tk = {given}", f"shape {mask.shape}")
    queries, keys = valid
    return (mask[:keys] if mask.ndim == 1 else mask[..., :queries, :keys]).ravel()
