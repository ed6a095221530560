"""One sequence, a batch or a list made uniform: changes with the kinds of argument that a call accepts.

Notation: B sequences, T rows of a sequence, d elements of a row. Token ids have no d.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention_client.arrays import as_floats, as_integers
from attention_client.errors import invalid
from attention_client.values import Array, Arrays, Texts


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the rows of an argument are: the rank of one sequence, and the words for it."""

    rank: int
    convert: Callable[[str, object], Array]
    one: str
    batch: str


_VECTORS = _Kind(rank=2, convert=as_floats, one="(T, d)", batch="(B, T, d)")
_TOKENS = _Kind(rank=1, convert=as_integers, one="(T,)", batch="(B, T)")


class Form(Enum):
    """The kind of argument; the answer is of the same kind."""

    ONE = "one sequence"
    BATCH = "a batch array"
    LIST = "a list of sequences"


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequences of one argument.

    Attributes:
        form: How the caller gave them.
        pieces: Arrays that hold the valid rows of all sequences in order: one per sequence, (T_i, d), or a
            single batch, (B, T, d), where all rows are valid.
        lengths: Valid rows of each sequence.
        rows: Rows of each sequence as the caller gave it: equal to its length, or more where it is padded.
    """

    form: Form
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


def vectors(field: str, value: Arrays, lengths: ArrayLike | None = None) -> Sequences:
    """Reads (T, d), (B, T, d) or a list of (T_i, d) of real numbers.

    Args:
        field: The argument's name, for errors.
        value: The sequences.
        lengths: Valid rows of each sequence of a batch, (B,) integers.

    Raises:
        InvalidArgumentError: The type, rank or size of an array is none of those, or of a length.
    """
    sequences = _read(field, value, _VECTORS)
    widths = {piece.shape[-1] for piece in sequences.pieces}
    if len(widths) > 1 or 0 in widths:
        raise invalid(field, "rows of one width, 1 or more", f"widths {sorted(widths)}")
    return _cut(sequences, lengths)


def token_ids(field: str, value: Arrays, lengths: ArrayLike | None = None) -> Sequences:
    """Reads (T,), (B, T) or a list of (T_i,) integers; as `vectors` otherwise."""
    return _cut(_read(field, value, _TOKENS), lengths)


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
    if array.ndim not in {kind.rank, kind.rank + 1}:
        raise invalid(field, f"{kind.one}, {kind.batch} or a list of {kind.one}", f"shape {array.shape}")
    form = Form.ONE if array.ndim == kind.rank else Form.BATCH
    count = 1 if form is Form.ONE else array.shape[0]
    rows = (int(array.shape[-kind.rank]),) * count
    _refuse_empty(field, rows)
    return Sequences(form, (array,), rows, rows)


def _read_list(field: str, value: Sequence[Any], kind: _Kind) -> Sequences:
    pieces = tuple(kind.convert(f"{field}[{index}]", item) for index, item in enumerate(value))
    for index, piece in enumerate(pieces):
        if piece.ndim != kind.rank:
            found = f"shape {piece.shape}; each item of a list is one sequence"
            raise invalid(f"{field}[{index}]", kind.one, found)
    rows = tuple(int(piece.shape[0]) for piece in pieces)
    _refuse_empty(field, rows)
    return Sequences(Form.LIST, pieces, rows, rows)


def _cut(sequences: Sequences, lengths: ArrayLike | None) -> Sequences:
    """Leaves out the rows of a batch past each sequence's length."""
    if lengths is None:
        return sequences
    if sequences.form is not Form.BATCH:
        raise invalid("lengths", f"None, for {sequences.form.value} has no padding", "lengths")
    valid = _read_lengths(lengths, sequences.rows)
    (batch,) = sequences.pieces
    pieces = tuple(batch[index, :length] for index, length in enumerate(valid))
    return Sequences(Form.BATCH, pieces, valid, sequences.rows)


def _read_lengths(lengths: ArrayLike, rows: tuple[int, ...]) -> tuple[int, ...]:
    array = as_integers("lengths", lengths)
    if array.shape != (len(rows),):
        raise invalid("lengths", f"shape ({len(rows)},), one per sequence", f"shape {array.shape}")
    valid = tuple(int(length) for length in array)
    if min(valid) < 1 or max(valid) > rows[0]:
        raise invalid("lengths", f"values from 1 to {rows[0]}, the rows given", list(valid))
    return valid


def _refuse_empty(field: str, rows: tuple[int, ...]) -> None:
    if not rows:
        raise invalid(field, "at least one sequence", "none")
    if 0 in rows:
        where = f"{field}[{rows.index(0)}]" if len(rows) > 1 else field
        raise invalid(where, "at least one row", "a sequence of none")
