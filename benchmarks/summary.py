"""Medians and spreads over the rounds of a cell, and ratios of two systems round by round."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from benchmarks.results import Cell, Index, Measurement

Figure = Callable[[Measurement], float | None]


@dataclass(frozen=True)
class Spread:
    """The median of some rounds with the smallest and the largest."""

    median: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """Largest by smallest: 1 where all rounds agree."""
        return self.high / self.low if self.low > 0 else float("inf")


def spread(values: Iterable[float | None]) -> Spread | None:
    """Summarises the values that are there; None where there are none."""
    found = [value for value in values if value is not None]
    return Spread(median(found), min(found), max(found)) if found else None


def sequence_rate(measurement: Measurement) -> float:
    """Sequences per second."""
    return measurement.sequences_per_second


def token_rate(measurement: Measurement) -> float:
    """Query rows per second."""
    return measurement.tokens_per_second


def p50(measurement: Measurement) -> float | None:
    """Median latency of the round, in microseconds."""
    return measurement.latency.p50


def of(index: Index, cell: Cell, system: str, figure: Figure) -> Spread | None:
    """One figure of a system in a cell."""
    return spread(figure(one) for one in index.rounds(cell, system))


def combined(
    index: Index, cell: Cell, systems: tuple[str, ...], formula: Callable[..., float | None]
) -> Spread | None:
    """A figure made of one measurement of each system, taken round by round.

    The systems of a round were measured one after the other, so that what slows the machine for a while
    slows them all, and their ratio stays.
    """
    rounds = (index.rounds(cell, system) for system in systems)
    return spread(formula(*measurements) for measurements in zip(*rounds, strict=False))


def ratio(index: Index, cell: Cell, over: str, under: str, figure: Figure) -> Spread | None:
    """One system's figure by another's, round by round."""

    def formula(one: Measurement, other: Measurement) -> float | None:
        above, below = figure(one), figure(other)
        return above / below if above is not None and below else None

    return combined(index, cell, (over, under), formula)
