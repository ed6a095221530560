"""Medians and ranges over the rounds of a cell, and ratios of two systems round by round."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from benchmarks.results import EAGER, ONNX, EnrichmentRates, Index, Measurement, MemoryCurve
from benchmarks.workload import Cell

Metric = Callable[[Measurement], float | None]

FIRST_MINUTE, MARGIN = 60.0, 10.0
"""Seconds. The first value of a memory curve is the median within MARGIN / 2 of one minute, and its last
value is the median of the last MARGIN."""


@dataclass(frozen=True)
class Spread:
    """The median of some values, the smallest and the largest."""

    median: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """The largest value divided by the smallest."""
        return self.high / self.low if self.low > 0 else float("inf")


def spread(values: Iterable[float | None]) -> Spread | None:
    """Summarises values; returns None if all of them are None."""
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


def of(index: Index, cell: Cell, system: str, metric: Metric) -> Spread | None:
    """Summarises a metric of one system in a cell."""
    return spread(metric(one) for one in index.rounds(cell, system))


def combined(
    index: Index, cell: Cell, systems: tuple[str, ...], formula: Callable[..., float | None]
) -> Spread | None:
    """Summarises a formula of one measurement of each system, evaluated round by round.

    The systems of a round were measured one after the other: a disturbance of the machine affects all of
    them, and their ratio changes little.
    """
    rounds = (index.rounds(cell, system) for system in systems)
    return spread(formula(*measurements) for measurements in zip(*rounds, strict=False))


def ratio(index: Index, cell: Cell, over: str, under: str, metric: Metric) -> Spread | None:
    """Summarises a metric of one system divided by that of another, round by round."""

    def formula(one: Measurement, other: Measurement) -> float | None:
        above, below = metric(one), metric(other)
        return above / below if above is not None and below else None

    return combined(index, cell, (over, under), formula)


def graph_ratios(grid: Index) -> dict[Cell, float]:
    """Returns by cell the tokens per second of the exported graph divided by those of eager PyTorch."""
    found = {cell: ratio(grid, cell, ONNX, EAGER, token_rate) for cell in grid.cells()}
    return {cell: value.median for cell, value in found.items() if value is not None}


def enrichment_ratio(rates: EnrichmentRates) -> Spread | None:
    """Returns the rows per second through one server divided by those in process, round by round."""
    pairs = zip(rates.one_server, rates.in_process, strict=True)
    return spread(served / own for served, own in pairs)


def memory_after_a_minute(memory: MemoryCurve) -> float | None:
    """Returns bytes; None if the load was shorter."""
    return _typical(memory, FIRST_MINUTE - MARGIN / 2, FIRST_MINUTE + MARGIN / 2)


def memory_at_end(memory: MemoryCurve) -> float | None:
    """Returns bytes; None if there are no samples."""
    last = memory.samples[-1].seconds if memory.samples else 0.0
    return _typical(memory, last - MARGIN, last)


def memory_growth(memory: MemoryCurve) -> Spread | None:
    """Returns the last value divided by the first; None if the load did not last well beyond a minute."""
    first, last = memory_after_a_minute(memory), memory_at_end(memory)
    if first is None or last is None or memory.seconds < FIRST_MINUTE + 2 * MARGIN:
        return None
    return spread([last / first])


def _typical(memory: MemoryCurve, since: float, until: float) -> float | None:
    found = [one.resident_bytes for one in memory.samples if since <= one.seconds <= until]
    return median(found) if found else None
