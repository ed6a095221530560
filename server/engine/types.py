"""The values that pass through the engine: decoded requests, validated work, results.

Notation: S sequences of a request, T rows of one sequence, Tq and Tk query and key rows, H heads.
"""

import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from server.engine.model import LoadedModel

Array = NDArray[Any]
BITS_PER_BYTE = 8


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of different lengths, their rows concatenated.

    Attributes:
        rows: (sum of lengths, ...).
        lengths: Rows of each of the S sequences. Python's integers: NumPy's reductions cost more than they
            save on the few sequences of a request.
    """

    rows: Array
    lengths: tuple[int, ...]


class MaskKind(StrEnum):
    """What the mask of one sequence spans."""

    KEYS = "keys"
    """(Tk,): the same for every query row and head."""
    PAIRS = "pairs"
    """(Tq, Tk): the same for every head."""
    HEADS = "heads"
    """(H, Tq, Tk)."""


@dataclass(frozen=True, eq=False)
class Mask:
    """The masks of all sequences of a request, True = may attend.

    Attributes:
        kind: What each sequence's mask spans.
        data: The flags of all masks, row-major, concatenated: one boolean each, or one bit each, the first
            in the lowest bit of the first byte. Bits fill their last byte with flags that mean nothing.
    """

    kind: MaskKind
    data: NDArray[np.bool_] | NDArray[np.uint8]

    def holds(self, count: int) -> bool:
        """Whether there are that many flags."""
        size = self.data.size
        return size == (count if self.data.dtype == np.bool_ else -(-count // BITS_PER_BYTE))

    def flags(self, count: int) -> NDArray[np.bool_]:
        """That many flags, one boolean each."""
        if self.data.dtype == np.bool_:
            return self.data.view(np.bool_)
        return np.unpackbits(self.data.view(np.uint8), count=count, bitorder="little").view(np.bool_)


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """What a caller asks for, decoded and not yet validated.

    Attributes:
        inputs: Sequences by the name of the model's input.
        texts: For models with a tokenizer, in place of inputs.
        deadline: On `time.monotonic`'s clock, in seconds.
    """

    inputs: Mapping[str, Ragged] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    mask: Mask | None = None
    return_weights: bool = False
    deadline: float = math.inf


@dataclass(frozen=True, eq=False)
class Item:
    """One sequence of a request, validated.

    Attributes:
        inputs: Arrays (T, ...) by input name.
        sizes: Length by symbolic axis, such as {"query_length": 7}.
        mask: Broadcasts to (H, Tq, Tk); None where every key may be attended to.
    """

    inputs: Mapping[str, Array]
    sizes: Mapping[str, int]
    mask: NDArray[np.bool_] | None


@dataclass(frozen=True, eq=False)
class Result:
    """The answer to one request: for each output one array per sequence, in the request's order.

    `context_vectors` are (Tq, d_out), `attention_weights` (H, Tq, Tk).
    """

    outputs: Mapping[str, list[Array]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    """A validated request: the only thing that may enter the queue.

    Attributes:
        in_flight_bytes: Memory that it holds from submission to result.
        future: Resolves once, with a result or an `EngineError`; cancelled by a caller that left.
    """

    model: "LoadedModel"
    items: tuple[Item, ...]
    return_weights: bool
    masked: bool
    deadline: float
    in_flight_bytes: int
    future: "Future[Result]" = field(default_factory=Future)
