"""Ways to reduce the context vectors of a sequence to one vector."""

from collections.abc import Callable
from enum import StrEnum

import numpy as np

from attention_client.enrich.backend import Array


class Pool(StrEnum):
    """What is stored of the (T, d) context vectors of a sequence."""

    NONE = "none"
    """All of them: (T, d)."""
    MEAN = "mean"
    """Their mean: (d,)."""
    CLS = "cls"
    """The first one, which models of the BERT family compute for the token [CLS]: (d,)."""
    MAX = "max"
    """The maximum of each element: (d,)."""


POOLS: dict[Pool, Callable[[Array], Array]] = {
    Pool.NONE: lambda rows: rows,
    Pool.MEAN: lambda rows: rows.mean(axis=0, dtype=np.float32),
    Pool.CLS: lambda rows: rows[0],
    Pool.MAX: lambda rows: rows.max(axis=0),
}
