"""Requests that are almost right, of both protocols and over HTTP, beside small good requests."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from benchmarks.processes import process_tree
from scripts.local_server import ServerProcess, serving
from tests.chaos.figures import Figures, scaled
from tests.chaos.process import Neighbour, readings, reset_peak
from tests.encoders.repository import SENTENCE, SENTENCE_MODELS
from tests.server.api.messages import attend_request
from tests.server.http.clients import HOST, http_port
from tests.support.artifacts import cached_repositories, link_tree
from tests.support.contradictions import Made, good_and_contradicted, good_bodies
from tests.support.mutations import Good, mutated

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]
WINDOW, WINDOWS, WARM_UP = 500, scaled(40, 100), 1500
IN_FLIGHT = 4
PATIENCE_SECONDS = 60.0
MAX_DELAY_SECONDS = 0.2
MAX_GROWTH_BYTES = 50_000_000
# What a request causes, it causes again; a delay by another program of this machine rarely comes twice.
ATTEMPTS = 4
# Of the contradictory messages, as many again are changed byte by byte.
BYTES_SHARE = 0.3
# How a request may end whose bytes are arbitrary: nothing fails unexpectedly.
ALLOWED = {
    *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"),
    *("FAILED_PRECONDITION", "200", "400", "404", "413", "415", "422", "429", "503", "504"),
}
_local = threading.local()


def send(target: str, port: int, seed: int, count: int) -> dict[str, int]:
    """Sends requests that depend on the seed only, from another process; returns how many ended how."""
    rng = random.Random(seed)  # noqa: S311 - the same mutations every time
    sources, made = good_and_contradicted(), list[Made]()
    for _ in range(count):
        good, contradict = rng.choice(sources)
        by_bytes = good.headers is None and rng.random() < BYTES_SHARE
        own = Good(good.method, good.data)
        made.append(Made(own.method, mutated(own, rng)) if by_bytes else contradict(rng))
    with grpc.insecure_channel(target) as channel, ThreadPoolExecutor(IN_FLIGHT) as pool:
        return dict(Counter(pool.map(lambda one: answer(channel, port, one), made)))


def answer(channel: grpc.Channel, port: int, made: Made) -> str:
    """The status of a request, of gRPC or of HTTP."""
    if made.headers is None:
        call: Any = channel.unary_unary(made.method)
        try:
            call(made.data, timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"
    if not hasattr(_local, "connection"):
        _local.connection = HTTPConnection(HOST, port, timeout=PATIENCE_SECONDS)
    for _ in range(2):  # the server may have closed a connection that was idle
        try:
            return str(post(_local.connection, made))
        except (HTTPException, OSError):
            _local.connection.close()
    return "closed"


def post(connection: HTTPConnection, made: Made) -> int:
    """Sends a request and reads its answer; returns its status."""
    connection.request("POST", made.method, made.data, made.headers or {})
    response = connection.getresponse()
    response.read()
    return response.status


class Window(NamedTuple):
    """What some requests did: outcomes, delay of the neighbours in seconds, growth of a process in bytes."""

    codes: dict[str, int]
    delay: float
    grown: int


def measured(server: ServerProcess, generator: ProcessPoolExecutor, seed: int, count: int = WINDOW) -> Window:
    """Sends requests beside a small good one every 10 ms over gRPC, and another over HTTP."""
    port, good = http_port(server.log), good_bodies()[0].sent()
    with grpc.insecure_channel(server.target) as channel, closing(HTTPConnection(HOST, port)) as connection:
        attend: Any = AttentionServiceStub(channel).Attend
        calls = (
            partial(attend, attend_request([4]), timeout=PATIENCE_SECONDS),
            partial(post, connection, good),
        )
        for call in calls:
            call()
        neighbours = [Neighbour(call) for call in calls]
        before = {pid: reset_peak(pid) for pid in process_tree(server.process.pid)}
        codes = generator.submit(send, server.target, port, seed, count).result()
        grown = max(readings(pid).peak - resident for pid, resident in before.items())
        return Window(codes, max(neighbour.stop() for neighbour in neighbours), grown)


@pytest.fixture(scope="module")
def mutated_server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the small models and of a text encoder, with an HTTP port."""
    folder = tmp_path_factory.mktemp("mutated")
    (encoders,) = cached_repositories(SENTENCE_MODELS)
    for model in (*artifacts.iterdir(), encoders / SENTENCE):
        link_tree(model, folder / "models" / model.name)
    with serving(folder / "models", folder / "log", "--http-port=0", "--allow-shared-memory") as process:
        yield process


def test_mutated_requests_neither_fail_the_server_nor_delay_good_requests(
    mutated_server: ServerProcess, generator: ProcessPoolExecutor
) -> None:
    measured(mutated_server, generator, 0, WARM_UP)  # the allocator grows during the first requests
    codes, last, repeated = Counter[str](), list[Window](), 0
    for seed in range(1, 1 + WINDOWS):
        for _ in range(ATTEMPTS):
            window = measured(mutated_server, generator, seed)
            codes.update(window.codes)
            if window.delay <= MAX_DELAY_SECONDS and window.grown <= MAX_GROWTH_BYTES:
                break
            repeated += 1
        last.append(window)
    with Figures(f"{WINDOWS * WINDOW:,} mutated requests") as figures:
        figures.among("outcomes", dict(codes), ALLOWED)
        figures.at_most(
            "largest growth of a process, bytes", max(one.grown for one in last), MAX_GROWTH_BYTES
        )
        figures.at_most("largest delay of a neighbour, s", max(one.delay for one in last), MAX_DELAY_SECONDS)
        figures.note(f"windows of {WINDOW} requests that were sent again", repeated)
        figures.equal("errors in the log", mutated_server.log.read_text().count(" ERROR "), 0)
