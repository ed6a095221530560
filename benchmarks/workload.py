"""What is asked: models, lengths, and the sequences drawn from them.

Shapes: T, Tq, Tk rows of a sequence; d its width.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Sequence = tuple[Array, ...]
"""One array for each input of the model: (Tq, d), and for cross-attention (Tk, d)."""

MIXED_POOL = 64
UNIFORM_POOL = 4
LONG_POOL = 1
LONG = 2048
"""From this length on, one sequence is enough: a pass over more would take seconds."""
MEDIAN_SHARE = 20
"""The median of a mix is its longest length divided by this: about 50 rows on average up to 512."""
SIGMA = 1.2
"""Standard deviation of the logarithm of a mix's lengths."""


class Kind(StrEnum):
    """Which attention a model computes."""

    SELF = "self"
    CAUSAL = "causal"
    CROSS = "cross"


@dataclass(frozen=True)
class Model:
    """One of the measured models."""

    kind: Kind
    width: int
    heads: int

    @property
    def name(self) -> str:
        """Its name in the repository."""
        return f"{self.kind}-{self.width}x{self.heads}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of its inputs; the key of cross-attention is its own value."""
        return ("query", "key") if self.kind is Kind.CROSS else ("query",)


@dataclass(frozen=True)
class Lengths:
    """Either one length, or a lognormal mix from 1 to a longest one."""

    longest: int
    mixed: bool = False

    @property
    def name(self) -> str:
        """How reports call it."""
        return f"mixed 1-{self.longest}" if self.mixed else str(self.longest)

    @property
    def pool(self) -> int:
        """How many different sequences are asked in turn."""
        if self.mixed:
            return MIXED_POOL
        return LONG_POOL if self.longest >= LONG else UNIFORM_POOL

    def draw(self, count: int, *, seed: int = 0) -> list[int]:
        """Lengths in random order; of a mix one from the middle of each of `count` equal quantiles.

        So a small pool has the mean of the distribution, and the same count gives the same lengths.
        """
        if not self.mixed:
            return [self.longest] * count
        normal = NormalDist(np.log(self.longest / MEDIAN_SHARE), SIGMA)
        quantiles = [np.exp(normal.inv_cdf((at + 0.5) / count)) for at in range(count)]
        lengths = np.clip(np.rint(quantiles), 1, self.longest).astype(int)
        return [int(length) for length in np.random.default_rng(seed).permutation(lengths)]


@lru_cache(maxsize=16)
def sequences(model: Model, lengths: Lengths) -> tuple[Sequence, ...]:
    """The sequences that every system is asked, in this order, again and again.

    A key is as long as the query of the next sequence, so that a mix has both longer and shorter keys.
    """
    rows = lengths.draw(lengths.pool)
    rng = np.random.default_rng(1)
    shapes = [
        [rows[(at + shift) % len(rows)] for shift in range(len(model.inputs))] for at in range(len(rows))
    ]
    return tuple(
        tuple(rng.standard_normal((length, model.width), dtype=np.float32) for length in shape)
        for shape in shapes
    )
