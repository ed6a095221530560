"""What a run writes down: every measurement of every round, and where it was made. Read back from JSON."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.histogram import Percentiles
from benchmarks.workload import Lengths, Model

FILE = "results.json"
MEMORY_FILE = "memory.json"

# Systems, by the names that reports use.
ONNX = "ONNX Runtime in process"
EAGER = "eager PyTorch in process"
ECHO = "bare gRPC echo"
SERVICE = "service"
TYPED = "service, attention.v1"
STREAM = "service, stream"
BULK = "service, 64 in one request"
TRITON = "Triton (Python backend)"
TORCHSERVE = "TorchServe"


@dataclass(frozen=True)
class Cell:
    """One place of the grid.

    Attributes:
        in_flight: Sequences on their way at a time.
        bulk: Sequences of one request where a system takes many; then each system has its best number of
            requests in flight.
    """

    model: Model
    lengths: Lengths
    in_flight: int
    bulk: int = 1

    @property
    def name(self) -> str:
        """How reports call it."""
        load = f"{self.bulk} sequences" if self.bulk > 1 else f"{self.in_flight} in flight"
        return f"{self.model.kind} d {self.model.width}, length {self.lengths.name}, {load}"


@dataclass(frozen=True)
class Measurement:
    """One system in one cell in one round.

    Attributes:
        latency: Of one request; of one run in process.
        client_us: Processor time of the load generator for each request, in microseconds.
        server_us: The same of the server.
        how: What was chosen, where a system has several ways.
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
class Memory:
    """A soak: when it began, what was asked for how long, and the memory curve."""

    date: str
    load: str
    seconds: float
    requests: int
    samples: tuple[MemorySample, ...]


@dataclass(frozen=True)
class Environment:
    """Where and when the run was made, and how long it took."""

    date: str
    seconds: float
    machine: dict[str, str]
    versions: dict[str, str]
    settings: dict[str, str]
    absent: tuple[str, ...]
    """Peers that are not installed."""


@dataclass(frozen=True)
class Results:
    """A whole run."""

    environment: Environment
    grid: tuple[Measurement, ...]
    growth: tuple[Measurement, ...]
    open_loop: tuple[OpenLoopMeasurement, ...]
    failures: tuple[str, ...] = ()
    """Cells that a system did not answer, and why."""


@dataclass(frozen=True)
class Index:
    """Finds the rounds of a system in a cell."""

    measurements: tuple[Measurement, ...]
    _rounds: dict[tuple[Cell, str], list[Measurement]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rounds: dict[tuple[Cell, str], list[Measurement]] = {}
        for one in self.measurements:
            rounds.setdefault((one.cell, one.system), []).append(one)
        object.__setattr__(self, "_rounds", rounds)

    def rounds(self, cell: Cell, system: str) -> list[Measurement]:
        """Its measurements, by round; none where it was not measured."""
        return sorted(self._rounds.get((cell, system), []), key=lambda one: one.round)

    def cells(self) -> Iterator[Cell]:
        """Every cell once, in the order of measurement."""
        return iter(dict.fromkeys(one.cell for one in self.measurements))

    def systems(self) -> list[str]:
        """Every system once, in the order of measurement."""
        return list(dict.fromkeys(one.system for one in self.measurements))


def save(value: Results | Memory, path: Path) -> None:
    """Writes a run as JSON."""
    path.write_bytes(TypeAdapter(type(value)).dump_json(value, indent=1) + b"\n")


def load_results(folder: Path) -> Results:
    """Reads what `save` wrote."""
    return TypeAdapter(Results).validate_json((folder / FILE).read_bytes())


def load_memory(folder: Path) -> Memory | None:
    """Reads a soak; None where none was made."""
    path = folder / MEMORY_FILE
    return TypeAdapter(Memory).validate_json(path.read_bytes()) if path.exists() else None
