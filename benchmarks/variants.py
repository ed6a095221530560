"""Compares what a user of one service can choose: the model's precision, the wire's type, and the address."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from benchmarks import load
from benchmarks.checkout import Checkout
from benchmarks.compare import WARM_SECONDS, ComparisonPlan
from benchmarks.environment import export_models
from benchmarks.load import Endpoint, LoadResult, MeasurementWindow
from benchmarks.processes import ServerAddress, worker
from benchmarks.summary import Spread, spread
from benchmarks.systems import MeasurementError
from benchmarks.wire import Api
from benchmarks.workload import MIDDLE, SHORT, WIDE, Lengths, Model

PLAN = ComparisonPlan(rounds=9, seconds=0.3)


class Variant(NamedTuple):
    """One way to ask for the same context vectors.

    Attributes:
        name: In the table.
        model: The model, in its precision.
        data_type: Element type on the wire.
        by_socket: Whether calls go through the Unix domain socket.
    """

    name: str
    model: Model = WIDE
    data_type: str = "FP32"
    by_socket: bool = False


BASE = Variant("fp32")
VARIANTS = (
    BASE,
    Variant("fp16, computed in fp32 on CPUs", model=replace(WIDE, precision="fp16")),
    Variant("int8", model=replace(WIDE, precision="int8")),
    Variant("fp32, FP16 on the wire", data_type="FP16"),
    Variant("fp32, BF16 on the wire", data_type="BF16"),
    Variant("fp32, Unix domain socket", by_socket=True),
)


class VariantLoad(NamedTuple):
    """A load that every variant receives."""

    name: str
    lengths: Lengths
    in_flight: int


LOADS = (
    VariantLoad("6 x 768, 1 in flight", SHORT, 1),
    VariantLoad("6 x 768, 32 in flight", SHORT, 32),
    VariantLoad("128 x 768, 8 in flight", MIDDLE, 8),
)


@dataclass(frozen=True)
class Finding:
    """A variant under a load.

    Attributes:
        variant: Its name.
        rate: Sequences per second.
        ratio: Its rate divided by that of the first variant, round by round.
        microseconds: Processor time of the server for each sequence.
        difference: The largest absolute difference of its context vectors from those of the first variant.
    """

    variant: str
    rate: Spread | None
    ratio: Spread | None
    microseconds: Spread | None
    difference: float


class Addresses(NamedTuple):
    """The addresses of one server."""

    port: ServerAddress
    socket: ServerAddress


@contextmanager
def serving(cache: Path, server_options: tuple[str, ...]) -> Iterator[Addresses]:
    """Exports the models of the variants and serves them, at a port and at a socket."""
    models = tuple(dict.fromkeys(variant.model for variant in VARIANTS))
    with worker() as torch_worker:
        repository = export_models(Checkout(), models, cache, torch_worker)
    log = cache.resolve() / "variants.log"
    # Paths of sockets must be short.
    with TemporaryDirectory() as folder:
        options = (f"--unix-socket={folder}/socket", *server_options)
        with Checkout().serving(repository, log, *options) as server:
            yield Addresses(server, ServerAddress(f"unix:{folder}/socket", server.pid))


def measure(
    chosen: VariantLoad, plan: ComparisonPlan, generator: ProcessPoolExecutor, server: Addresses
) -> list[Finding]:
    """Measures every variant under one load, in turn.

    Raises:
        CallFailedError: The server did not answer the first request of a variant.
        MeasurementError: A request failed.
    """
    endpoints = [_endpoint(variant, chosen, server) for variant in VARIANTS]
    answers = [generator.submit(load.first_response, endpoint).result()[0] for endpoint in endpoints]
    window = MeasurementWindow(plan.seconds, WARM_SECONDS)
    rounds: list[list[LoadResult]] = []
    for at in range(plan.rounds):
        order = list(enumerate(endpoints))
        found = {
            index: generator.submit(load.closed_loop, endpoint, chosen.in_flight, window).result()
            for index, endpoint in (order if at % 2 == 0 else reversed(order))
        }
        rounds.append([found[index] for index, _ in order])
    if any(result.failures for results in rounds for result in results):
        raise MeasurementError(f"{chosen.name}: requests failed")

    def summary(index: int, metric: Callable[[LoadResult, LoadResult], float]) -> Spread | None:
        return spread(metric(results[index], results[0]) for results in rounds)

    return [
        Finding(
            variant=variant.name,
            rate=summary(index, lambda own, _: _rate(own)),
            ratio=summary(index, lambda own, base: _rate(own) / _rate(base)),
            microseconds=summary(index, lambda own, _: 1e6 * own.server_seconds / own.sequences),
            difference=float(np.abs(answers[index] - answers[0]).max()),
        )
        for index, variant in enumerate(VARIANTS)
    ]


def _endpoint(variant: Variant, chosen: VariantLoad, server: Addresses) -> Endpoint:
    address = server.socket if variant.by_socket else server.port
    return Endpoint(
        address.address,
        address.pid,
        Api.OPEN_INFERENCE,
        variant.model,
        chosen.lengths,
        data_type=variant.data_type,
    )


def _rate(result: LoadResult) -> float:
    return result.sequences / result.seconds
