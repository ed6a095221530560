"""The measurements of a run and the conditions under which they were made, written to and read from JSON."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from benchmarks.workload import Cell

RESULTS_FILE = "results.json"
MEMORY_FILE = "memory.json"
ENRICHMENT_FILE = "enrichment.json"

# Names of the systems in reports.
ONNX = "ONNX Runtime in process"
EAGER = "eager PyTorch in process"
ECHO = "bare gRPC echo"
SERVICE = "service"
TYPED = "service, attention.v1"
STREAM = "service, stream"
BATCH = "service, 64 in one request"
LOWEST = "service, --latency lowest"
INT8 = "service, int8"
TRITON = "Triton (Python backend)"
TRITON_CPP = "Triton (C++ backend)"
TRITON_CPP_SINGLE = "Triton (C++ backend, one instance)"
TORCHSERVE = "TorchServe"

NANOSECONDS_PER_MICROSECOND = 1_000


@dataclass(frozen=True)
class Percentiles:
    """Latencies in microseconds; None if there were too few requests for a percentile."""

    count: int
    p50: float | None
    p90: float | None = None
    p99: float | None = None
    p99_9: float | None = None

    @classmethod
    def of(cls, latencies: NDArray[np.int64]) -> "Percentiles":
        """Summarises latencies in nanoseconds.

        A percentile beyond the median is left out if less than one request lies beyond it: it would be the
        latency of a single stall.
        """
        count = len(latencies)

        def at(percent: float) -> float | None:
            beyond = round(count * (100 - percent) / 100, 6)
            if not count or (percent > 50 and beyond < 1):  # noqa: PLR2004 - the median
                return None
            value = np.percentile(latencies, percent, method="inverted_cdf")
            return float(value) / NANOSECONDS_PER_MICROSECOND

        return cls(count, at(50), at(90), at(99), at(99.9))


@dataclass(frozen=True)
class Measurement:
    """One system in one cell in one round.

    Attributes:
        latency: Latency of one request; in process, the duration of one call.
        client_us: Processor time of the load generator for one request, in microseconds.
        server_us: Processor time of the server for one request, in microseconds.
        how: The choice that was fastest, if the system has a choice.
    """

    cell: Cell
    system: str
    round: int
    sequences_per_second: float
    tokens_per_second: float
    seconds: float
    latency: Percentiles
    client_us: float = 0.0
    server_us: float = 0.0
    how: str = ""


@dataclass(frozen=True)
class OpenLoopMeasurement:
    """One system at one fixed rate, all rounds together.

    Attributes:
        share: The rate as a share of the system's own closed-loop rate.
        rate: Requests per second that were due.
        failures: Requests that were refused or failed.
    """

    cell: Cell
    system: str
    share: float
    rate: float
    failures: int
    latency: Percentiles


@dataclass(frozen=True)
class MemorySample:
    """Resident memory of the server at one moment."""

    seconds: float
    resident_bytes: int


@dataclass(frozen=True)
class MemoryCurve:
    """Resident memory of the server during a long load.

    Attributes:
        date: Start of the load.
        load: The load in words.
        seconds: Duration of the load.
        requests: Number of responses.
    """

    date: str
    load: str
    seconds: float
    requests: int
    samples: tuple[MemorySample, ...]


@dataclass(frozen=True)
class EnrichmentRates:
    """Rows per second of enrichment by round, of a table of sequences of 6 vectors of 64.

    Attributes:
        rows: Rows of the table.
    """

    date: str
    rows: int
    in_process: tuple[float, ...]
    one_server: tuple[float, ...]


@dataclass(frozen=True)
class Conditions:
    """Where and when a run was made, and its duration in seconds.

    Attributes:
        absent: Peers that were not installed.
    """

    date: str
    seconds: float
    machine: dict[str, str]
    versions: dict[str, str]
    settings: dict[str, str]
    absent: tuple[str, ...]


@dataclass(frozen=True)
class Results:
    """A complete run.

    Attributes:
        perf_analyzer: Cells that Triton's load generator measured as well.
        failures: What could not be measured, and why.
    """

    conditions: Conditions
    grid: tuple[Measurement, ...]
    growth: tuple[Measurement, ...]
    open_loop: tuple[OpenLoopMeasurement, ...]
    perf_analyzer: tuple[Measurement, ...] = ()
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Index:
    """Finds the measurements of a system in a cell."""

    measurements: tuple[Measurement, ...]
    _rounds: dict[tuple[Cell, str], list[Measurement]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rounds: dict[tuple[Cell, str], list[Measurement]] = {}
        for one in self.measurements:
            rounds.setdefault((one.cell, one.system), []).append(one)
        object.__setattr__(self, "_rounds", rounds)

    def rounds(self, cell: Cell, system: str) -> list[Measurement]:
        """Returns the measurements by round; an empty list if there are none."""
        return sorted(self._rounds.get((cell, system), []), key=lambda one: one.round)

    def cells(self) -> Iterator[Cell]:
        """Returns each cell once, in the order of measurement."""
        return iter(dict.fromkeys(one.cell for one in self.measurements))

    def systems(self) -> list[str]:
        """Returns each system once, in the order of measurement."""
        return list(dict.fromkeys(one.system for one in self.measurements))


def save(value: Results | MemoryCurve | EnrichmentRates, path: Path) -> None:
    """Writes measurements as JSON."""
    path.write_bytes(TypeAdapter(type(value)).dump_json(value, indent=1) + b"\n")


def load_results(folder: Path) -> Results:
    """Reads the results that `save` wrote.

    Raises:
        FileNotFoundError: The folder holds no results.
    """
    return TypeAdapter(Results).validate_json((folder / RESULTS_FILE).read_bytes())


def load_memory(folder: Path) -> MemoryCurve | None:
    """Reads the memory curve that `save` wrote; None if there is none."""
    path = folder / MEMORY_FILE
    return TypeAdapter(MemoryCurve).validate_json(path.read_bytes()) if path.exists() else None


def load_enrichment(folder: Path) -> EnrichmentRates | None:
    """Reads the rates of enrichment that `save` wrote; None if there are none."""
    path = folder / ENRICHMENT_FILE
    return TypeAdapter(EnrichmentRates).validate_json(path.read_bytes()) if path.exists() else None
