"""The systems that are measured side by side, each in a cell of the grid."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import load
from benchmarks.compute import ComputeResult
from benchmarks.load import Endpoint, LoadResult, MeasurementWindow
from benchmarks.processes import ServerAddress
from benchmarks.results import Measurement, Percentiles
from benchmarks.wire import Api
from benchmarks.workload import FP32, Array, Cell, Lengths, Model

MICROSECONDS = 1e6
# Between two versions of ONNX Runtime. Tests verify the tolerance of the service itself.
RTOL, ATOL = 1e-4, 1e-4
LOW_PRECISION_ATOL = 0.1
"""For int8: the tolerance of its export."""


class MeasurementError(Exception):
    """A system did not answer, or returned wrong values. The message says which system and what happened."""


@dataclass(frozen=True)
class Served:
    """A server under closed-loop load.

    Attributes:
        batch_requests: Whether the server receives all sequences of a batch cell in one request.
        batch_in_flight: Numbers of requests in flight to try in a batch cell, of which the fastest counts;
            empty if the server is not measured in batch cells.
        only: The cells in which the server is measured; None for all.
        precision: Precision of the model that is asked for.
    """

    name: str
    server: ServerAddress
    api: Api
    generator: ProcessPoolExecutor
    window: MeasurementWindow
    batch_requests: bool = False
    batch_in_flight: tuple[int, ...] = ()
    only: tuple[Cell, ...] | None = None
    precision: str = FP32

    def measures(self, cell: Cell) -> bool:
        """Returns whether the system is measured in a cell."""
        if self.only is not None and cell not in self.only:
            return False
        return bool(self.batch_in_flight) if cell.per_request > 1 else not self.batch_requests

    def endpoint(self, cell: Cell) -> Endpoint:
        """Returns the requests that the load generator sends."""
        count = cell.per_request if self.batch_requests else 1
        model = replace(cell.model, precision=self.precision)
        return Endpoint(self.server.address, self.server.pid, self.api, model, cell.lengths, count)

    def measure(self, cell: Cell, at_round: int) -> Measurement:
        """Measures the system once.

        Raises:
            MeasurementError: Requests failed.
        """
        choices = self.batch_in_flight if cell.per_request > 1 else (cell.in_flight,)
        found = [self._measure(cell, at_round, in_flight) for in_flight in choices]
        return max(found, key=lambda one: one.sequences_per_second)

    def _measure(self, cell: Cell, at_round: int, in_flight: int) -> Measurement:
        job = self.generator.submit(load.closed_loop, self.endpoint(cell), in_flight, self.window)
        result = job.result()
        if result.failures:
            raise MeasurementError(f"{result.failures} requests failed")
        return _from_load(cell, self.name, at_round, result, f"{in_flight} in flight")

    def validate(self, cell: Cell, expected: list[Array]) -> None:
        """Compares the first response with the expected context vectors.

        Raises:
            MeasurementError: The values differ.
            CallFailedError: The call failed.
        """
        found = self.generator.submit(load.first_response, self.endpoint(cell)).result()
        atol = ATOL if self.precision == FP32 else LOW_PRECISION_ATOL
        if self.api is not Api.ECHO and not agree(found, expected, atol=atol):
            raise MeasurementError("the context vectors differ from those computed in process")


def agree(found: list[Array], expected: list[Array], *, atol: float = ATOL) -> bool:
    """Returns whether two lists hold as many arrays, of equal shapes and of values within the tolerance."""
    return len(found) == len(expected) and all(
        one.shape == other.shape and np.allclose(one, other, rtol=RTOL, atol=atol)
        for one, other in zip(found, expected, strict=True)
    )


@dataclass(frozen=True)
class InProcess:
    """Compute without a server, in a worker process.

    Attributes:
        seconds: Duration of one measurement.
        measurement: Takes model, lengths, the number of sequences available at a time, and seconds.
        batch_cells: Whether the system is measured in batch cells.
    """

    name: str
    worker: ProcessPoolExecutor
    seconds: float
    measurement: Callable[[Model, Lengths, int, float], ComputeResult]
    batch_cells: bool

    def measures(self, cell: Cell) -> bool:
        """Returns whether the system is measured in a cell."""
        return cell.per_request == 1 or self.batch_cells

    def measure(self, cell: Cell, at_round: int) -> Measurement:
        """Measures the system once. All sequences that are in flight are available for one batch."""
        size = max(cell.in_flight, cell.per_request)
        result = self.worker.submit(self.measurement, cell.model, cell.lengths, size, self.seconds).result()
        return Measurement(
            cell=cell,
            system=self.name,
            round=at_round,
            sequences_per_second=result.sequences_per_second,
            tokens_per_second=result.tokens_per_second,
            seconds=result.seconds,
            latency=Percentiles(result.calls, result.median_seconds * MICROSECONDS),
            how=result.how,
        )


System = Served | InProcess


def _from_load(cell: Cell, system: str, at_round: int, result: LoadResult, how: str) -> Measurement:
    count = max(1, len(result.latencies))
    return Measurement(
        cell=cell,
        system=system,
        round=at_round,
        sequences_per_second=result.sequences / result.seconds,
        tokens_per_second=result.tokens / result.seconds,
        seconds=result.seconds,
        latency=Percentiles.of(result.latencies),
        client_us=result.client_seconds / count * MICROSECONDS,
        server_us=result.server_seconds / count * MICROSECONDS,
        how=how,
    )
