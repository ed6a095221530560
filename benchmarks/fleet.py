"""Starts what a run measures: workers, the service, the echo, and for one model the peers."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import compute_eager, compute_onnx, models
from benchmarks.channel import CallFailedError
from benchmarks.grid import Plan
from benchmarks.peers import installed
from benchmarks.processes import ServerAddress, running, worker
from benchmarks.processor import runs
from benchmarks.repository import GRAPH, artifact
from benchmarks.results import BULK, EAGER, ECHO, ONNX, SERVICE, STREAM, TRITON, TYPED, Cell
from benchmarks.systems import InProcess, Served
from benchmarks.targets import MIXED
from benchmarks.wire import Api
from benchmarks.workload import Kind, Model
from scripts.local_server import ROOT, serving

READY_SECONDS = 120
POLL_SECONDS = 0.1
BULK_IN_FLIGHT = {BULK: (1, 2, 4), TRITON: (8, 32, 64)}


@dataclass(frozen=True)
class Setup:
    """What a run is made with.

    Attributes:
        repository: Folder of the measured models.
        work: Folder of logs and temporary files.
        peers: Folder of the peers' scripts.
        server_options: Further options of `python -m server`.
    """

    plan: Plan
    repository: Path
    work: Path
    peers: Path
    server_options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workers:
    """One process each for load, for ONNX Runtime and for PyTorch."""

    generator: ProcessPoolExecutor
    onnx: ProcessPoolExecutor
    eager: ProcessPoolExecutor


@dataclass(frozen=True)
class Fleet:
    """What runs for a whole run."""

    setup: Setup
    workers: Workers
    service: ServerAddress
    echo: ServerAddress

    def in_process(self) -> list[InProcess]:
        """The compute without servers."""
        seconds, onnx, eager = self.setup.plan.compute_seconds, self.workers.onnx, self.workers.eager
        ceiling = partial(compute_onnx.measure, self.setup.repository)
        return [
            InProcess(ONNX, onnx, seconds, ceiling, bulk=True),
            InProcess(EAGER, eager, seconds, compute_eager.measure, bulk=False),
        ]

    def own(self, kind: Kind) -> list[Served]:
        """The echo and the service; the typed API's figures are taken on self-attention only."""
        served = [
            self.served(ECHO, self.echo, Api.ECHO),
            self.served(SERVICE, self.service, Api.OPEN_INFERENCE),
        ]
        if kind is Kind.SELF:
            served.append(self.served(TYPED, self.service, Api.ATTENTION))
            served.append(self.served(STREAM, self.service, Api.ATTENTION_STREAM))
            served.append(self.served(BULK, self.service, Api.ATTENTION))
        return served

    def served(self, name: str, server: ServerAddress, api: Api) -> Served:
        """A system under load."""
        window, bulk = self.setup.plan.window, BULK_IN_FLIGHT.get(name, ())
        return Served(
            name, server, api, self.workers.generator, window, many=name == BULK, bulk_in_flight=bulk
        )

    @contextmanager
    def others(self, model: Model) -> Iterator[list[Served]]:
        """The installed peers that take a model, started for it."""
        graph = (artifact(self.setup.repository, model) / GRAPH).resolve()
        with ExitStack() as stack:
            yield [
                self.served(
                    peer.name,
                    stack.enter_context(peer.serving(self.setup.peers, graph, model, self.setup.work)),
                    peer.api,
                )
                for peer in installed(self.setup.peers)
                if model.kind in peer.kinds
            ]

    def validate(self, served: Served, model: Model) -> None:
        """Waits until a system is ready, and compares its first answers.

        Raises:
            CallFailedError: It was not ready in time.
            MeasurementError: Its values are wrong.
        """
        count = MIXED.pool if served.many else 1
        job = self.workers.onnx.submit(compute_onnx.answer, self.setup.repository, model, MIXED, count)
        cell, expected = Cell(model, MIXED, 1, count), job.result()
        until = time.monotonic() + READY_SECONDS
        while True:
            try:
                return served.validate(cell, expected)
            except CallFailedError:
                if time.monotonic() > until or not runs(served.server.pid):
                    raise
            time.sleep(POLL_SECONDS)


@contextmanager
def open_fleet(setup: Setup) -> Iterator[Fleet]:
    """Exports what is missing, and starts workers, service and echo."""
    setup.work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        workers = Workers(*(stack.enter_context(worker()) for _ in range(3)))
        for model in setup.plan.models:
            workers.eager.submit(models.export, model, setup.repository).result()
        service = stack.enter_context(open_service(setup))
        echo = stack.enter_context(open_echo(setup.work))
        yield Fleet(setup, workers, service, echo)


@contextmanager
def open_service(setup: Setup) -> Iterator[ServerAddress]:
    """The service with its default settings."""
    with serving(setup.repository, setup.work / "service.log", *setup.server_options) as server:
        yield ServerAddress(server.target, server.process.pid)
        server.stop()


@contextmanager
def open_echo(work: Path) -> Iterator[ServerAddress]:
    """The echo; it says its port in its first line."""
    log = work / "echo.log"
    command = [sys.executable, "-m", "benchmarks.echo"]
    with running(command, log, {"PYTHONPATH": str(ROOT)}) as process:
        until = time.monotonic() + READY_SECONDS
        while not log.read_text().endswith("\n"):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the echo did not start:\n{log.read_text()}")
            time.sleep(POLL_SECONDS)
        yield ServerAddress(f"127.0.0.1:{int(log.read_text())}", process.pid)
