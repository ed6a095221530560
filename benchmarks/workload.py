"""What is measured: models, lengths, the cells of the grid, and the extent of a run.

Shapes: T rows of a sequence; d its width.
"""

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_serving.export.precision import Precision

Array = NDArray[Any]

MIXED_POOL, UNIFORM_POOL, LONG_POOL = 64, 4, 1
LONG_ROWS = 2048
"""From this length on, the pool holds one sequence: a pass over several would take seconds."""
MEDIAN_SHARE = 20
"""The median of mixed lengths is the longest length divided by this: about 50 rows on average up to 512."""
SIGMA = 1.2
"""Standard deviation of the logarithm of mixed lengths."""
BATCH_REQUEST = 64
"""Sequences of a request that holds many."""


@dataclass(frozen=True)
class Model:
    """A measured self-attention module, by its own name in the repository if it has one."""

    width: int
    heads: int
    precision: Precision = Precision.FP32
    served_as: str = ""

    @property
    def name(self) -> str:
        """Name of the model in the repository."""
        suffix = "" if self.precision is Precision.FP32 else f"-{self.precision}"
        return self.served_as or f"self-{self.width}x{self.heads}{suffix}"


@dataclass(frozen=True)
class Lengths:
    """Either a single length, or lengths from 1 to `longest` with a lognormal distribution."""

    longest: int
    mixed: bool = False

    @property
    def name(self) -> str:
        """Name in reports."""
        return f"mixed 1-{self.longest}" if self.mixed else str(self.longest)

    @property
    def pool(self) -> int:
        """Number of different sequences that are sent in turn."""
        if self.mixed:
            return MIXED_POOL
        return LONG_POOL if self.longest >= LONG_ROWS else UNIFORM_POOL

    def draw(self, count: int, *, seed: int = 0) -> list[int]:
        """Returns `count` lengths in random order, the same ones for the same count and seed.

        Mixed lengths are the middles of `count` equal quantiles, so that a small pool has the mean of the
        distribution.
        """
        if not self.mixed:
            return [self.longest] * count
        normal = NormalDist(np.log(self.longest / MEDIAN_SHARE), SIGMA)
        quantiles = [np.exp(normal.inv_cdf((at + 0.5) / count)) for at in range(count)]
        lengths = np.clip(np.rint(quantiles), 1, self.longest).astype(int)
        return [int(length) for length in np.random.default_rng(seed).permutation(lengths)]


@lru_cache(maxsize=16)
def sequences(model: Model, lengths: Lengths) -> tuple[Array, ...]:
    """Returns the sequences (T, d) that are sent to every system, in this order, repeatedly."""
    rng = np.random.default_rng(1)
    return tuple(
        rng.standard_normal((length, model.width), dtype=np.float32) for length in lengths.draw(lengths.pool)
    )


def groups(model: Model, lengths: Lengths, size: int) -> list[tuple[Array, ...]]:
    """Returns the sequences in groups of `size`; a small pool is repeated to fill one group."""
    pool = sequences(model, lengths)
    repeated = pool * -(-size // len(pool))
    return [repeated[at : at + size] for at in range(0, len(repeated), size)]


@dataclass(frozen=True)
class Cell:
    """A point of the grid: a model, lengths, and a load.

    Attributes:
        in_flight: Requests in flight at a time.
        per_request: Sequences in one request. A system whose requests hold one sequence receives as many
            requests at a time instead.
    """

    model: Model
    lengths: Lengths
    in_flight: int
    per_request: int = 1

    @property
    def name(self) -> str:
        """Name in reports."""
        size = f" of {self.per_request}" if self.per_request > 1 else ""
        precision = "" if self.model.precision is Precision.FP32 else f"{self.model.precision}, "
        return f"{precision}{self.lengths.name} x {self.model.width}, {self.in_flight}{size} in flight"


NARROW = Model(64, 4)
WIDE = Model(768, 12)
SHORT, MIDDLE, LONG, MIXED = Lengths(6), Lengths(128), Lengths(512), Lengths(512, mixed=True)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The extent of a run.

    Attributes:
        extra: Cells in addition to the product of models, lengths and loads.
        rounds: How often each system is measured in each cell.
        seconds: Length of one measurement under load; compute_seconds: in process; open_seconds: at a rate.
        warm_seconds: Load before each measurement.
        shares: Rates of the open loop, as shares of a system's rate in the cell's closed loop.
    """

    models: tuple[Model, ...]
    lengths: tuple[Lengths, ...]
    in_flight: tuple[int, ...]
    extra: tuple[Cell, ...]
    open_cells: tuple[Cell, ...] = ()
    shares: tuple[float, ...] = (0.2, 0.5, 0.8)
    rounds: int = 3
    seconds: float = 0.25
    warm_seconds: float = 0.05
    compute_seconds: float = 0.12
    open_seconds: float = 1.0

    def cells(self, model: Model) -> list[Cell]:
        """Returns all cells of a model."""
        product = [Cell(model, lengths, count) for lengths in self.lengths for count in self.in_flight]
        return product + [cell for cell in self.extra if cell.model == model]


BATCHES = tuple(Cell(model, MIXED, 4, BATCH_REQUEST) for model in (NARROW, WIDE))
FULL = Plan(
    models=(NARROW, WIDE),
    lengths=(SHORT, MIDDLE, LONG, MIXED),
    in_flight=(1, 8, 32),
    extra=(
        *BATCHES,
        *(Cell(model, Lengths(rows), 1) for model in (NARROW, WIDE) for rows in (1024, 2048, 4096)),
    ),
    open_cells=(Cell(WIDE, SHORT, 32), Cell(WIDE, MIXED, 32), Cell(NARROW, SHORT, 32)),
)
QUICK = Plan(
    models=(NARROW, WIDE),
    lengths=(SHORT, MIXED),
    in_flight=(1, 32),
    extra=(*BATCHES, Cell(WIDE, MIDDLE, 8)),
    open_cells=(Cell(WIDE, SHORT, 32),),
    shares=(0.5, 0.8),
    seconds=0.2,
    compute_seconds=0.1,
)
