"""One vector of the context vectors of a sequence: changes with the ways of pooling."""

from collections.abc import Callable
from enum import StrEnum

import numpy as np

from attention_client._values import Array


class Pool(StrEnum):
    """What becomes of the (T, d) context vectors of a sequence."""

    NONE = "none"
    """They stay: (T, d)."""
    MEAN = "mean"
    """Their mean: (d,)."""
    CLS = "cls"
    """The first of them, where models of the BERT family put the sequence's own token: (d,)."""
    MAX = "max"
    """The largest of each element: (d,)."""


POOLS: dict[Pool, Callable[[Array], Array]] = {
    Pool.NONE: lambda rows: rows,
    Pool.MEAN: lambda rows: rows.mean(axis=0, dtype=np.float32),
    Pool.CLS: lambda rows: rows[0],
    Pool.MAX: lambda rows: rows.max(axis=0),
}
