"""Everything that runs during a benchmark: worker processes, the service, the echo and the peers."""

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import compute, eager, peers
from benchmarks.channel import CallFailedError
from benchmarks.checkout import VERSION, Checkout
from benchmarks.load import MeasurementWindow
from benchmarks.processes import ServerAddress, free_ports, is_running, running, worker
from benchmarks.results import (
    BATCH,
    EAGER,
    ECHO,
    INT8,
    LOWEST,
    ONNX,
    SERVICE,
    STREAM,
    TRITON,
    TRITON_CPP,
    TYPED,
)
from benchmarks.systems import InProcess, Served
from benchmarks.wire import Api
from benchmarks.workload import MIDDLE, MIXED, NARROW, SHORT, WIDE, AttentionKind, BenchmarkPlan, Cell, Model

GRAPH = "model.onnx"
"""The graph without masks and lengths, which the peers serve."""
ECHO_PORT = 19000
READY_SECONDS = 120
POLL_SECONDS = 0.1
LOWEST_OPTION = "--latency=lowest"
LOWEST_CELLS = (Cell(WIDE, SHORT, 1), Cell(NARROW, SHORT, 1))
INT8_MODEL = replace(WIDE, precision="int8")
INT8_CELLS = (Cell(WIDE, SHORT, 32), Cell(WIDE, MIDDLE, 8))
BATCH_IN_FLIGHT = {BATCH: (1, 2, 4), TRITON: (8, 32, 64), TRITON_CPP: (8, 32, 64)}


@dataclass(frozen=True)
class Setup:
    """The parameters of a run.

    Attributes:
        cache: Folder for exported models, logs and temporary files.
        server_options: Further options of `python -m server`.
    """

    plan: BenchmarkPlan
    cache: Path
    server_options: tuple[str, ...] = ()

    @property
    def repository(self) -> Path:
        """Folder of the measured models."""
        return Checkout().repository(self.cache)

    @property
    def work(self) -> Path:
        """Folder of logs and temporary files."""
        return (self.cache / "work").resolve()


@dataclass(frozen=True)
class Workers:
    """One process each for the load generator, ONNX Runtime and PyTorch."""

    generator: ProcessPoolExecutor
    onnx: ProcessPoolExecutor
    eager: ProcessPoolExecutor


@dataclass(frozen=True)
class Environment:
    """The processes that last for a whole run.

    Attributes:
        lowest: The service with `--latency lowest`.
    """

    setup: Setup
    workers: Workers
    service: ServerAddress
    lowest: ServerAddress
    echo: ServerAddress

    def in_process(self) -> list[InProcess]:
        """Returns the systems without a server."""
        seconds, onnx, torch = self.setup.plan.compute_seconds, self.workers.onnx, self.workers.eager
        ceiling = partial(compute.measure_onnx, self.setup.repository)
        return [
            InProcess(ONNX, onnx, seconds, ceiling, batch_cells=True),
            InProcess(EAGER, torch, seconds, eager.measure, batch_cells=False),
        ]

    def own(self, model: Model) -> list[Served]:
        """Returns the echo and the service. attention.v1 is measured with self-attention only."""
        found = [
            self._served(ECHO, self.echo, Api.ECHO),
            self._served(SERVICE, self.service, Api.OPEN_INFERENCE),
        ]
        if model.kind is AttentionKind.SELF:
            found.append(self._served(TYPED, self.service, Api.ATTENTION))
            found.append(self._served(STREAM, self.service, Api.ATTENTION_STREAM))
            found.append(self._served(BATCH, self.service, Api.ATTENTION))
        if model in (WIDE, NARROW):
            lowest = self._served(LOWEST, self.lowest, Api.OPEN_INFERENCE)
            found.append(replace(lowest, only=LOWEST_CELLS))
        if model == WIDE:
            int8 = self._served(INT8, self.service, Api.OPEN_INFERENCE)
            found.append(replace(int8, only=INT8_CELLS, precision=INT8_MODEL.precision))
        return found

    def _served(self, name: str, server: ServerAddress, api: Api) -> Served:
        plan = self.setup.plan
        return Served(
            name,
            server,
            api,
            self.workers.generator,
            MeasurementWindow(plan.seconds, plan.warm_seconds),
            batch_requests=name == BATCH,
            batch_in_flight=BATCH_IN_FLIGHT.get(name, ()),
        )

    @contextmanager
    def peers(self, model: Model) -> Iterator[list[Served]]:
        """Starts the installed peers that can serve a model."""
        graph = self.setup.repository / model.name / str(VERSION) / GRAPH
        with ExitStack() as stack:
            yield [
                self._served(
                    peer.name, stack.enter_context(peer.serving(graph, model, self.setup.work)), peer.api
                )
                for peer in peers.installed()
                if model.kind in peer.kinds
            ]

    def validate(self, served: Served, model: Model) -> None:
        """Waits until a system is ready, and verifies its first response.

        Raises:
            CallFailedError: The system was not ready in time.
            MeasurementError: Its context vectors are wrong.
        """
        count = MIXED.pool if served.batch_requests else 1
        job = self.workers.onnx.submit(compute.expected_context, self.setup.repository, model, MIXED, count)
        cell, expected = Cell(model, MIXED, 1, count), job.result()
        until = time.monotonic() + READY_SECONDS
        while True:
            try:
                return served.validate(cell, expected)
            except CallFailedError:
                if time.monotonic() > until or not is_running(served.server.pid):
                    raise
            time.sleep(POLL_SECONDS)


@contextmanager
def open_environment(setup: Setup) -> Iterator[Environment]:
    """Exports the models that are missing, and starts workers, service and echo."""
    setup.work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        workers = Workers(*(stack.enter_context(worker()) for _ in range(3)))
        export_models(Checkout(), (*setup.plan.models, INT8_MODEL), setup.cache, workers.eager)
        service, lowest = (
            stack.enter_context(Checkout().serving(setup.repository, setup.work / log, *options))
            for log, options in (
                ("service.log", setup.server_options),
                ("service.lowest.log", (LOWEST_OPTION, *setup.server_options)),
            )
        )
        echo = stack.enter_context(_open_echo(setup.work))
        yield Environment(setup, workers, service, lowest, echo)


def export_models(
    checkout: Checkout, models: tuple[Model, ...], cache: Path, torch_worker: ProcessPoolExecutor
) -> Path:
    """Exports models with a checkout's exporter and returns their repository. Weights are always equal."""
    repository = checkout.repository(cache)
    weights = cache / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    for model in models:
        file = torch_worker.submit(eager.save_weights, model, weights.resolve()).result()
        checkout.export(model, file, repository)
    return repository


@contextmanager
def _open_echo(work: Path) -> Iterator[ServerAddress]:
    port = free_ports(1, start=ECHO_PORT)
    command = [sys.executable, "-m", "benchmarks.peers.echo", str(port)]
    environment = {**os.environ, **Checkout().environment}
    with running(command, work / "echo.log", environment, Checkout().root) as process:
        yield ServerAddress(f"127.0.0.1:{port}", process.pid)
