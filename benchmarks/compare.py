"""Compares the service of two checkouts under alternating load, to show whether a change made it slower."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import load
from benchmarks.channel import CallFailedError
from benchmarks.checkout import Checkout
from benchmarks.environment import export_models
from benchmarks.load import Endpoint, MeasurementWindow
from benchmarks.processes import ServerAddress, worker
from benchmarks.summary import Spread, spread
from benchmarks.systems import MeasurementError, agree
from benchmarks.wire import Api
from benchmarks.workload import BATCH_REQUEST, MIDDLE, MIXED, NARROW, SHORT, WIDE, Lengths, Model

WARM_SECONDS = 0.1


@dataclass(frozen=True)
class ComparisonCell:
    """A load that both servers receive."""

    name: str
    api: Api
    model: Model
    lengths: Lengths
    in_flight: int
    per_request: int = 1

    def endpoint(self, server: ServerAddress) -> Endpoint:
        """Returns the requests for one of the servers."""
        return Endpoint(server.address, server.pid, self.api, self.model, self.lengths, self.per_request)


CELLS = (
    ComparisonCell("6 x 768, 1 in flight", Api.OPEN_INFERENCE, WIDE, SHORT, 1),
    ComparisonCell("6 x 768, 32 in flight", Api.OPEN_INFERENCE, WIDE, SHORT, 32),
    ComparisonCell("6 x 64, 32 in flight", Api.OPEN_INFERENCE, NARROW, SHORT, 32),
    ComparisonCell("128 x 768, 8 in flight", Api.OPEN_INFERENCE, WIDE, MIDDLE, 8),
    ComparisonCell("mixed 1-512 x 768, 32 in flight", Api.OPEN_INFERENCE, WIDE, MIXED, 32),
    ComparisonCell("64 mixed x 768 in one request", Api.ATTENTION, WIDE, MIXED, 2, BATCH_REQUEST),
    ComparisonCell("6 x 64 on a stream, 32 in flight", Api.ATTENTION_STREAM, NARROW, SHORT, 32),
)


@dataclass(frozen=True)
class Comparison:
    """The rates of both checkouts in one cell, in sequences per second.

    Attributes:
        this: One rate for each round; None if the server did not answer in time.
        other: The same for the other checkout.
    """

    cell: str
    this: tuple[float | None, ...]
    other: tuple[float | None, ...]

    @property
    def failures(self) -> tuple[int, int]:
        """The number of failed rounds of this checkout, and of the other one."""
        return self.this.count(None), self.other.count(None)

    @property
    def ratio(self) -> Spread | None:
        """The rate of this checkout divided by that of the other one, over the rounds that have both."""
        pairs = zip(self.this, self.other, strict=True)
        return spread(one / other for one, other in pairs if one is not None and other is not None)


@dataclass(frozen=True)
class ComparisonPlan:
    """The extent of a comparison: rounds, and seconds of each window of load."""

    rounds: int
    seconds: float


FULL = ComparisonPlan(rounds=15, seconds=0.5)
QUICK = ComparisonPlan(rounds=5, seconds=0.25)


@contextmanager
def serving(
    checkout: Checkout, cache: Path, log: Path, server_options: tuple[str, ...]
) -> Iterator[ServerAddress]:
    """Exports the models of the cells with a checkout's exporter, and serves them."""
    with worker() as torch_worker:
        repository = export_models(checkout, (NARROW, WIDE), cache, torch_worker)
    with checkout.serving(repository, log, *server_options) as server:
        yield server


@contextmanager
def open_pair(
    other: Path, cache: Path, server_options: tuple[str, ...]
) -> Iterator[tuple[ProcessPoolExecutor, ServerAddress, ServerAddress]]:
    """Exports the models with each checkout's exporter, and starts both servers.

    Yields:
        The process of the load generator, the server of this checkout, and the server of the other one.
    """
    work = (cache / "work").resolve()
    work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        generator = stack.enter_context(worker())
        servers = []
        for name, checkout in (("this", Checkout()), ("other", Checkout(other.resolve()))):
            log = work / f"compare.{name}.log"
            servers.append(stack.enter_context(serving(checkout, cache, log, server_options)))
        yield generator, servers[0], servers[1]


def compare_cell(
    cell: ComparisonCell,
    plan: ComparisonPlan,
    generator: ProcessPoolExecutor,
    this: ServerAddress,
    other: ServerAddress,
) -> Comparison:
    """Measures both servers in a cell.

    Raises:
        CallFailedError: A server did not answer the first request.
        MeasurementError: The servers return different context vectors.
    """
    responses = [
        generator.submit(load.first_response, cell.endpoint(server)).result() for server in (this, other)
    ]
    if not agree(*responses):
        raise MeasurementError(f"{cell.name}: the two servers return different context vectors")
    window = MeasurementWindow(plan.seconds, WARM_SECONDS)

    def rate(server: ServerAddress) -> float | None:
        job = generator.submit(load.closed_loop, cell.endpoint(server), cell.in_flight, window)
        try:
            result = job.result()
        except CallFailedError:
            return None
        return None if result.failures else result.sequences / result.seconds

    return interleave(cell.name, plan.rounds, lambda: rate(this), lambda: rate(other))


def interleave(
    name: str, rounds: int, this: Callable[[], float | None], other: Callable[[], float | None]
) -> Comparison:
    """Measures two rates alternately. Each round reverses the order, so that a drift affects both alike."""
    ours: list[float | None] = []
    theirs: list[float | None] = []
    for at in range(rounds):
        pair = [(ours, this), (theirs, other)]
        for rates, measure in pair if at % 2 == 0 else reversed(pair):
            rates.append(measure())
    return Comparison(name, tuple(ours), tuple(theirs))
