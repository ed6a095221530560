"""The systems that are measured side by side, and what a cell's rounds say about them."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.precision import TOLERANCES, Precision
from benchmarks import compute, load
from benchmarks.channel import CallFailedError
from benchmarks.load import Endpoint, MeasurementWindow
from benchmarks.wire import Api
from benchmarks.workload import Array, Cell

# In fp32 between two versions of ONNX Runtime. Tests verify the tolerance of the service itself.
ACCEPTED = {**TOLERANCES, Precision.FP32: Tolerance(rtol=1e-4, atol=1e-4)}
PERCENTS = (50, 90, 99, 99.9)


class MeasurementError(Exception):
    """A system did not answer, or returned wrong values. The message says what happened."""


@dataclass(frozen=True)
class Measurement:
    """One system in one cell in one round.

    Attributes:
        p50: Median latency of one request, in microseconds; in process, the median duration of one call.
        server_us: Processor time of the server for one request, in microseconds.
    """

    sequences_per_second: float
    tokens_per_second: float
    p50: float
    server_us: float = 0.0


Rounds = Mapping[str, Sequence[Measurement | None]]
"""The measurements of a cell: for each system one of each round, None where it failed."""


@dataclass(frozen=True)
class Served:
    """A server under load. `pid` is that of the process whose time is measured; 0 if it is unknown."""

    name: str
    address: str
    pid: int
    api: Api
    generator: ProcessPoolExecutor
    window: MeasurementWindow

    def endpoint(self, cell: Cell) -> Endpoint:
        """Returns the requests that the load generator sends."""
        count = cell.per_request if self.api is Api.ATTENTION else 1
        return Endpoint(self.address, self.pid, self.api, cell.model, cell.lengths, count)

    def measure(self, cell: Cell) -> Measurement:
        """Measures the server once in a closed loop."""
        single = cell.per_request > 1 and self.api is not Api.ATTENTION
        in_flight = cell.per_request if single else cell.in_flight
        result = self.generator.submit(load.closed_loop, self.endpoint(cell), in_flight, self.window).result()
        if result.failures:
            raise MeasurementError(f"{result.failures} requests failed")
        return Measurement(
            sequences_per_second=result.sequences / result.seconds,
            tokens_per_second=result.tokens / result.seconds,
            p50=float(np.median(result.latencies)) / 1000,
            server_us=1e6 * result.server_seconds / len(result.latencies),
        )

    def first_response(self, cell: Cell) -> list[Array]:
        """Returns the context vectors of the first request."""
        return self.generator.submit(load.first_response, self.endpoint(cell)).result()


@dataclass(frozen=True)
class InProcess:
    """Compute without a server, in a worker process: all sequences in flight are available for one batch."""

    name: str
    worker: ProcessPoolExecutor
    prepare: compute.Prepare
    repository: Path
    seconds: float

    def measure(self, cell: Cell) -> Measurement:
        """Measures the library once."""
        size = cell.per_request if cell.per_request > 1 else cell.in_flight
        arguments = (self.repository, cell.model, cell.lengths, size, self.seconds)
        try:
            return Measurement(*self.worker.submit(compute.measure, self.prepare, *arguments).result())
        except Exception as error:  # each library raises its own, such as for too little memory
            raise MeasurementError(str(error)[:300]) from error


def measure_in_rounds(
    cell: Cell, systems: Sequence[Served | InProcess], rounds: int, failures: list[str]
) -> dict[str, list[Measurement | None]]:
    """Measures each system once in each round. Each round begins with another system."""
    measurements: dict[str, list[Measurement | None]] = {system.name: [] for system in systems}
    for at in range(rounds):
        first = at % len(systems)
        for system in (*systems[first:], *systems[:first]):
            try:
                measurement = system.measure(cell)
            except (CallFailedError, MeasurementError) as error:
                failures.append(f"{system.name}, {cell.name}: {error}")
                measurement = None
            measurements[system.name].append(measurement)
    return measurements


def agree(arrays: list[Array], expected: list[Array], precision: Precision) -> bool:
    """Returns whether two lists hold as many arrays, of equal shapes and of values within the tolerance."""
    return len(arrays) == len(expected) and all(map(ACCEPTED[precision].holds, arrays, expected))


class Spread(NamedTuple):
    """The median of some values, the smallest and the largest."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def median_of(rounds: Rounds, system: str, metric: str) -> float | None:
    """Returns the median of an attribute of the measurements of one system; None if all of them failed."""
    values = [getattr(measurement, metric) for measurement in rounds.get(system, ()) if measurement]
    return median(values) if values else None


def ratio(rounds: Rounds, over: str, under: str) -> Spread | None:
    """Summarises the rate of one system divided by that of another, round by round.

    The systems of a round were measured one after the other: a disturbance of the machine affects all of
    them, and their ratio changes little.
    """
    pairs = zip(rounds.get(over, ()), rounds.get(under, ()), strict=False)
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in pairs if a and b]
    return Spread(median(ratios), min(ratios), max(ratios)) if ratios else None


def percentiles(latencies: NDArray[np.int64]) -> list[float | None]:
    """Returns the latencies at PERCENTS in microseconds, of values in nanoseconds.

    A percentile beyond the median is left out if less than one request lies beyond it: it would be the
    latency of a single stall.
    """
    count, (middle, *further) = len(latencies), PERCENTS
    percents = [middle, *(percent for percent in further if round(count * (100 - percent) / 100, 6) >= 1)]
    values = np.percentile(latencies, percents, method="inverted_cdf") / 1000 if count else ()
    return [*map(float, values), *[None] * (len(PERCENTS) - len(values))]
