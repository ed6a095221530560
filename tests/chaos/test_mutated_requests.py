"""Requests that are almost right, of both protocols and over HTTP, beside small good requests."""

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import pytest

from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.limits import MIB
from benchmarks.processes import process_tree
from scripts.local_server import ServerProcess, serving
from tests.chaos.figures import Figures
from tests.chaos.mutation_sender import ALLOWED, GOOD_EVERY, Outcome, send
from tests.chaos.neighbours import Neighbour
from tests.chaos.process import readings, reset_peak
from tests.chaos.scale import Scale
from tests.encoders.repository import ENCODERS, SENTENCE
from tests.server.api.messages import attend_request
from tests.server.http.clients import HOST, http_port
from tests.support.artifacts import cached_repositories, link_tree
from tests.support.contradictions import good_bodies

pytestmark = pytest.mark.chaos
WINDOW, WARM_UP, GOOD_WINDOWS = 500, 1500, 8
PATIENCE_SECONDS = 60.0
MAX_DELAY_SECONDS = 0.1
MAX_MEMORY_RATIO, MAX_MEMORY_BYTES = 4, 50_000_000
# What a request causes, it causes again; a delay by another program of this machine rarely comes twice.
ATTEMPTS = 4


@pytest.fixture(scope="module")
def mutated_server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the small models and of a text encoder, with an HTTP port."""
    folder = tmp_path_factory.mktemp("mutated")
    (encoders,) = cached_repositories(ENCODERS)
    for model in (*artifacts.iterdir(), encoders / SENTENCE):
        link_tree(model, folder / "models" / model.name)
    with serving(folder / "models", folder / "log", "--http-port=0", "--allow-shared-memory") as process:
        yield process


class Neighbours:
    """A small good request every 10 ms over gRPC, and another over HTTP."""

    def __init__(self, server: ServerProcess) -> None:
        self._resources = ExitStack()
        channel = self._resources.enter_context(grpc.insecure_channel(server.target))
        attend: Any = AttentionServiceStub(channel).Attend
        connection = HTTPConnection(HOST, http_port(server.log), timeout=PATIENCE_SECONDS)
        self._resources.callback(connection.close)
        sent = good_bodies()[0].sent()

        def post() -> None:
            connection.request("POST", sent.path, sent.data, sent.headers)
            response = connection.getresponse()
            response.read()
            assert response.status == 200

        attend(attend_request([4]), timeout=PATIENCE_SECONDS)
        post()
        self._neighbours = {
            "gRPC": Neighbour(lambda: attend(attend_request([4]), timeout=PATIENCE_SECONDS)),
            "HTTP": Neighbour(post),
        }

    def delays(self) -> dict[str, float]:
        """Ends the requests; the longest time to an answer beyond the usual one, in seconds."""
        times = {name: neighbour.stop() for name, neighbour in self._neighbours.items()}
        self._resources.close()
        return {name: max(own) - statistics.median(own) for name, own in times.items()}


@dataclass(frozen=True)
class Window:
    """What some requests did: outcomes, the delay of each neighbour, and growth of a process in bytes."""

    outcome: Outcome
    delays: dict[str, float]
    grown: int

    def holds(self, floor: dict[str, float]) -> bool:
        """Whether the bounds hold, given the delays beside good requests."""
        is_small = self.grown <= MAX_MEMORY_RATIO * self.outcome.largest + MAX_MEMORY_BYTES
        return is_small and all(self.delays[name] <= MAX_DELAY_SECONDS + own for name, own in floor.items())


class Measured:
    """A server under requests that another process sends."""

    def __init__(self, server: ServerProcess, generator: ProcessPoolExecutor) -> None:
        self._server, self._generator = server, generator

    def window(self, seed: int, count: int = WINDOW, good_every: int = GOOD_EVERY) -> Window:
        """Sends requests that depend on the seed only, and measures meanwhile."""
        server, port = self._server, http_port(self._server.log)
        neighbours = Neighbours(server)
        before = {pid: reset_peak(pid) for pid in process_tree(server.process.pid)}
        outcome = self._generator.submit(send, server.target, port, seed, count, good_every).result()
        grown = max(readings(pid).peak - resident for pid, resident in before.items())
        return Window(outcome, neighbours.delays(), grown)

    def floor(self) -> dict[str, float]:
        """The delays beside as many good requests."""
        windows = [self.window(seed, good_every=1) for seed in range(GOOD_WINDOWS)]
        return {name: max(own.delays[name] for own in windows) for name in windows[0].delays}


@pytest.mark.timeout(3600)
def test_mutated_requests_neither_fail_the_server_nor_delay_or_change_good_answers(
    mutated_server: ServerProcess, generator: ProcessPoolExecutor, scale: Scale
) -> None:
    measured = Measured(mutated_server, generator)
    measured.window(0, WARM_UP)  # the allocator grows during the first requests
    floor, started = measured.floor(), time.monotonic()
    windows: list[Window] = []
    tried: list[Window] = []
    for seed in range(1, 1 + scale.mutations // WINDOW):
        for _ in range(ATTEMPTS):
            tried.append(measured.window(seed))
            if tried[-1].holds(floor):
                break
        windows.append(tried[-1])
    seconds = time.monotonic() - started
    codes = sum((own.outcome.codes for own in windows), Counter[str]())
    largest = max(windows, key=lambda own: own.grown)
    with Figures("mutated requests") as figures:
        figures.among("outcomes", dict(codes), ALLOWED)
        figures.equal("wrong outcomes", [each for own in tried for each in own.outcome.wrong][:5], [])
        figures.note("requests in a second, with neighbours", WINDOW * len(tried) / seconds)
        figures.note("largest request in bytes", max(own.outcome.largest for own in windows))
        bound = (MAX_MEMORY_RATIO * largest.outcome.largest + MAX_MEMORY_BYTES) / MIB
        figures.at_most("largest growth of a process, MiB", largest.grown / MIB, bound)
        for name, own in floor.items():
            delays = [1000 * window.delays[name] for window in windows]
            figures.note(f"{name}: delay beside good requests, ms", 1000 * own)
            figures.note(f"{name}: median delay beside mutated ones, ms", statistics.median(delays))
            figures.at_most(f"{name}: largest delay, ms", max(delays), 1000 * (MAX_DELAY_SECONDS + own))
        figures.note(f"windows of {WINDOW} requests that were sent again", len(tried) - len(windows))
        figures.equal("errors in the log", mutated_server.log.read_text().count(" ERROR "), 0)
