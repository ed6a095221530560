"""What goes into a call and comes out of it: changes with what a caller may ask or is told.

Notation: "..." the leading axes of a batch, T rows of a sequence, Tq query rows, Tk key rows, H heads,
d elements of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray: TypeAlias = NDArray[np.float32]
Array: TypeAlias = NDArray[Any]
# One array is one sequence or, with leading axes, a batch of equal ones; a list or a tuple holds one
# sequence per item.
Arrays: TypeAlias = Array | Sequence[ArrayLike]
Texts: TypeAlias = list[str] | tuple[str, ...]
AnswerT = TypeVar("AnswerT", FloatArray, list[FloatArray])


@dataclass(frozen=True, slots=True, eq=False)
class AttentionResult(Generic[AnswerT]):
    """The answer to one call, in the kind of its query.

    The arrays are writable and belong to the caller. Those of a list are views of one buffer: holding one
    holds the memory of all.

    Attributes:
        context_vectors: float32; (Tq, d) for one sequence, (..., Tq, d) for a batch, a list of (Tq_i, d) for
            a list. Rows past a length are zeros.
        attention_weights: float32, or None where they were not asked for; (H, Tq, Tk), (..., H, Tq, Tk) or a
            list of (H, Tq_i, Tk_i). Rows and columns past a length are zeros.
        model_name: Name of the model that answered.
        model_version: Version of the model that answered.
    """

    context_vectors: AnswerT
    attention_weights: AnswerT | None
    model_name: str
    model_version: str


@dataclass(frozen=True, slots=True, eq=False)
class AttendInputs:
    """The inputs of one item of a stream that is more than a query; as the arguments of `attend`."""

    query: Arrays
    key: Arrays | None = None
    value: Arrays | None = None
    mask: Arrays | None = None
    lengths: ArrayLike | None = None
    positions: Arrays | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """One item of a stream of token ids; as the arguments of `attend_tokens`."""

    token_ids: Arrays
    mask: Arrays | None = None
    lengths: ArrayLike | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TextInputs:
    """One item of a stream of texts; as the arguments of `attend_text`."""

    text: str | Texts
    mask: Arrays | None = None


# An array, a list or a tuple is a query.
StreamItem: TypeAlias = AttendInputs | TokenInputs | TextInputs | Arrays
# Items of one stream may be of different kinds, and so may its results.
Result: TypeAlias = AttentionResult[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a request says beside its inputs."""

    model: str
    version: str = ""
    return_weights: bool = False


class CallOptions(TypedDict, total=False):
    """Keyword arguments of `attend_text`."""

    mask: Arrays | None
    return_weights: bool
    timeout: float | None
    version: str


class PaddedOptions(CallOptions, total=False):
    """Keyword arguments of `attend_tokens`."""

    lengths: ArrayLike | None


class AttendOptions(PaddedOptions, total=False):
    """Keyword arguments of `attend`."""

    positions: Arrays | None


class StreamOptions(TypedDict, total=False):
    """Keyword arguments of `attend_stream` that do not change what it yields."""

    return_weights: bool
    max_in_flight: int
    timeout: float | None
    version: str
