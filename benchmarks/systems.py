"""What is measured side by side: each system measures itself in a cell of the grid."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks import load
from benchmarks.histogram import Percentiles, percentiles
from benchmarks.load import Endpoint, LoadResult, Window
from benchmarks.processes import ServerAddress
from benchmarks.results import Cell, Measurement
from benchmarks.timing import ComputeResult
from benchmarks.wire import Api
from benchmarks.workload import Array, Lengths, Model

MICROSECONDS = 1e6
# Results of two versions of ONNX Runtime; the service's own tolerance is held by its tests.
RTOL, ATOL = 1e-4, 1e-4


class MeasurementError(Exception):
    """A system did not answer, or answered wrongly; the message says which and how."""


class System(Protocol):
    """One column of the report."""

    @property
    def name(self) -> str:
        """How reports call it."""

    def measures(self, cell: Cell) -> bool:
        """Whether it takes part in a cell."""

    def measure(self, cell: Cell, at_round: int) -> Measurement:
        """Measures itself once."""


@dataclass(frozen=True)
class Served:
    """A server under closed-loop load.

    Attributes:
        many: Whether it takes all sequences of a bulk cell in one request.
        bulk_in_flight: Requests in flight to try in a bulk cell, where the best counts; none where it
            takes no part.
    """

    name: str
    server: ServerAddress
    api: Api
    generator: ProcessPoolExecutor
    window: Window
    many: bool = False
    bulk_in_flight: tuple[int, ...] = ()

    def measures(self, cell: Cell) -> bool:
        """As of System."""
        return bool(self.bulk_in_flight) if cell.bulk > 1 else not self.many

    def endpoint(self, cell: Cell) -> Endpoint:
        """What the load generator asks."""
        count = cell.bulk if self.many else 1
        return Endpoint(self.server.address, self.server.pid, self.api, cell.model, cell.lengths, count)

    def measure(self, cell: Cell, at_round: int) -> Measurement:
        """As of System.

        Raises:
            MeasurementError: Requests failed.
        """
        choices = self.bulk_in_flight if cell.bulk > 1 else (cell.in_flight,)
        found = [self._measure(cell, at_round, in_flight) for in_flight in choices]
        return max(found, key=lambda one: one.sequences_per_second)

    def _measure(self, cell: Cell, at_round: int, in_flight: int) -> Measurement:
        job = self.generator.submit(load.closed_loop, self.endpoint(cell), in_flight, self.window)
        result = job.result()
        if result.failures:
            raise MeasurementError(f"{self.name}: {result.failures} requests failed in {cell.name}")
        return from_load(cell, self.name, at_round, result, f"{in_flight} requests in flight")

    def validate(self, cell: Cell, expected: list[Array]) -> None:
        """Compares its first answers with those of compute in process.

        Raises:
            MeasurementError: They differ.
            CallFailedError: There is no answer.
        """
        answers = self.generator.submit(load.ask, self.endpoint(cell)).result()
        if self.api is Api.ECHO:
            return
        for answer, right in zip(answers, expected, strict=False):
            if answer.shape != right.shape or not np.allclose(answer, right, rtol=RTOL, atol=ATOL):
                raise MeasurementError(f"{self.name}: wrong values for {cell.model.name}")


@dataclass(frozen=True)
class InProcess:
    """Compute without a server, in a worker of its own.

    Attributes:
        measuring: Takes model, lengths, how many sequences are there at a time, and seconds.
        bulk: Whether it takes part in bulk cells.
    """

    name: str
    worker: ProcessPoolExecutor
    seconds: float
    measuring: Callable[[Model, Lengths, int, float], ComputeResult]
    bulk: bool

    def measures(self, cell: Cell) -> bool:
        """As of System."""
        return cell.bulk == 1 or self.bulk

    def measure(self, cell: Cell, at_round: int) -> Measurement:
        """As of System: all sequences in flight are there for one batch."""
        size = max(cell.in_flight, cell.bulk)
        job = self.worker.submit(self.measuring, cell.model, cell.lengths, size, self.seconds)
        return _from_compute(cell, self.name, at_round, job.result())


def from_load(cell: Cell, system: str, at_round: int, result: LoadResult, how: str) -> Measurement:
    """A measurement of one window under load."""
    count = max(1, len(result.latencies))
    return Measurement(
        cell=cell,
        system=system,
        round=at_round,
        sequences_per_second=result.sequences / result.seconds,
        tokens_per_second=result.tokens / result.seconds,
        seconds=result.seconds,
        latency=percentiles(result.latencies),
        client_us=result.client_seconds / count * MICROSECONDS,
        server_us=result.server_seconds / count * MICROSECONDS,
        how=how,
    )


def _from_compute(cell: Cell, system: str, at_round: int, result: ComputeResult) -> Measurement:
    typical = result.median_seconds * MICROSECONDS
    return Measurement(
        cell=cell,
        system=system,
        round=at_round,
        sequences_per_second=result.sequences_per_second,
        tokens_per_second=result.tokens_per_second,
        seconds=result.seconds,
        latency=Percentiles(result.runs, typical, None, None, None),
        how=result.how,
    )
