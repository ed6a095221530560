"""One sequence, a batch or a list made uniform: changes with the kinds of argument that a call accepts.

Notation: "..." the leading axes of a batch, T rows of a sequence, d elements of a row. Token ids and
positions have no d.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention_client._arrays import as_floats, as_integers
from attention_client._values import Array, Arrays, Texts
from attention_client.errors import invalid


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the rows of an argument are: the rank of one sequence, and the words for it."""

    rank: int
    convert: Callable[[str, object], Array]
    one: str
    batch: str


_VECTORS = _Kind(rank=2, convert=as_floats, one="(T, d)", batch="(..., T, d)")
_INTEGERS = _Kind(rank=1, convert=as_integers, one="(T,)", batch="(..., T)")


class Form(Enum):
    """The kind of argument; the answer is of the same kind."""

    ONE = "one sequence"
    BATCH = "a batch array"
    LIST = "a list of sequences"


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequences of one argument.

    Attributes:
        field: The argument's name, for errors.
        form: How the caller gave them.
        leading: The axes that count them: none for one sequence, all before T for a batch, (number of
            sequences,) for a list.
        pieces: Arrays that hold the valid rows of all sequences in order: one per sequence, (T_i, d), or a
            single batch, (number of sequences, T, d), where all rows are valid.
        lengths: Valid rows of each sequence.
        rows: Rows of each sequence as the caller gave it: equal to its length, or more where it is padded.
    """

    field: str
    form: Form
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


def vectors(field: str, value: Arrays, lengths: ArrayLike | None = None) -> Sequences:
    """Reads (T, d), (..., T, d) or a list of (T_i, d) of real numbers.

    Args:
        field: The argument's name, for errors.
        value: The sequences.
        lengths: Valid rows of each sequence of a batch: integers, of the shape of its leading axes.

    Raises:
        InvalidArgumentError: The type, rank or size of an array is none of those, or of a length.
    """
    sequences = _read(field, value, _VECTORS)
    widths = {piece.shape[-1] for piece in sequences.pieces}
    if len(widths) > 1 or 0 in widths:
        raise invalid(field, "rows of one width, 1 or more", f"widths {sorted(widths)}")
    return _cut(sequences, lengths)


def integers(field: str, value: Arrays, lengths: ArrayLike | None = None) -> Sequences:
    """Reads (T,), (..., T) or a list of (T_i,) integers, token ids or positions; as `vectors` otherwise."""
    return _cut(_read(field, value, _INTEGERS), lengths)


def texts(field: str, value: str | Texts) -> tuple[Form, tuple[str, ...]]:
    """Reads one text, or a list or tuple of them.

    Raises:
        InvalidArgumentError: It is neither, or it is empty.
    """
    if isinstance(value, str):
        return Form.ONE, (value,)
    if not isinstance(value, list | tuple):
        raise invalid(field, "a str or a list of str", f"a {type(value).__name__}")
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise invalid(f"{field}[{index}]", "a str", f"a {type(text).__name__}")
    if not value:
        raise invalid(field, "at least one text", "an empty list")
    return Form.LIST, tuple(value)


def _read(field: str, value: Arrays, kind: _Kind) -> Sequences:
    if isinstance(value, list | tuple):
        return _read_list(field, value, kind)
    array = kind.convert(field, value)
    if array.ndim < kind.rank:
        raise invalid(field, f"{kind.one}, {kind.batch} or a list of {kind.one}", f"shape {array.shape}")
    leading, own = array.shape[: -kind.rank], array.shape[-kind.rank :]
    if 0 in leading:
        raise invalid(field, "at least one sequence", f"shape {array.shape}")
    count = math.prod(leading)
    rows = (int(own[0]),) * count
    _refuse_empty(field, rows)
    if not leading:
        return Sequences(field, Form.ONE, leading, (array,), rows, rows)
    return Sequences(field, Form.BATCH, leading, (array.reshape(count, *own),), rows, rows)


def _read_list(field: str, value: Sequence[Any], kind: _Kind) -> Sequences:
    pieces = tuple(kind.convert(f"{field}[{index}]", item) for index, item in enumerate(value))
    for index, piece in enumerate(pieces):
        if piece.ndim != kind.rank:
            found = f"shape {piece.shape}; each item of a list is one sequence"
            raise invalid(f"{field}[{index}]", kind.one, found)
    rows = tuple(int(piece.shape[0]) for piece in pieces)
    _refuse_empty(field, rows)
    return Sequences(field, Form.LIST, (len(pieces),), pieces, rows, rows)


def _cut(sequences: Sequences, lengths: ArrayLike | None) -> Sequences:
    """Leaves out the rows of a batch past each sequence's length."""
    if lengths is None:
        return sequences
    if sequences.form is not Form.BATCH:
        raise invalid("lengths", f"None, for {sequences.form.value} has no padding", "lengths")
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
        raise invalid(field, "at least one sequence", "none")
    if 0 in rows:
        where = f"{field}[{rows.index(0)}]" if len(rows) > 1 else field
        raise invalid(where, "at least one row", "a sequence of none")
