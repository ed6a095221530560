"""200,000 requests that are almost right, over a real server, with good requests in between."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from scripts.local_server import ServerProcess, serving
from server.engine.limits import MIB
from tests.chaos import scale
from tests.support.mutations import Good, good_requests, mutated

pytestmark = pytest.mark.chaos
REQUESTS = scale.current().mutations
# The allocator grows during the first requests.
SETTLING = REQUESTS // 4
IN_FLIGHT = 64
GOOD_EVERY = 100
PATIENCE_SECONDS = 60.0
MAX_GROWTH_BYTES = 32 * MIB
# How a request may end whose bytes are arbitrary.
ALLOWED = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
}


@pytest.fixture(scope="module")
def mutated_server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(artifacts, tmp_path_factory.mktemp("mutated") / "log") as process:
        yield process


class Caller:
    """Makes many calls at a time, and counts how they end."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.codes: Counter[str] = Counter()
        self.wrong: list[tuple[str, bytes]] = []
        self._methods: dict[str, Any] = {
            good.method: channel.unary_unary(good.method) for good in good_requests()
        }
        self._places = threading.Semaphore(IN_FLIGHT)

    def send(self, method: str, data: bytes, expected: bytes | None = None) -> None:
        """Makes one call; with the answer that it must have, if that is known."""
        self._places.acquire()
        call = self._methods[method].future(data, timeout=PATIENCE_SECONDS)
        call.add_done_callback(lambda done: self._ended(done, data, expected))

    def answer(self, good: Good) -> bytes:
        """The answer to a good request."""
        answer: bytes = self._methods[good.method](good.data, timeout=PATIENCE_SECONDS)
        return answer

    def finish(self) -> None:
        """Returns when every call has ended."""
        for _ in range(IN_FLIGHT):
            assert self._places.acquire(timeout=PATIENCE_SECONDS)
        self._places.release(IN_FLIGHT)

    def _ended(self, call: Any, data: bytes, expected: bytes | None) -> None:
        code = call.code().name
        self.codes[code] += 1
        if code not in ALLOWED or (expected is not None and (code != "OK" or call.result() != expected)):
            self.wrong.append((code, data[:200]))
        self._places.release()


def resident(server: ServerProcess) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) << 10


@pytest.mark.timeout(1200)
def test_mutated_requests_neither_fail_the_server_nor_change_good_answers(
    mutated_server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(0)  # noqa: S311 - the same mutations every time
    started = time.monotonic()
    settled = 0
    with grpc.insecure_channel(mutated_server.target) as channel:
        caller = Caller(channel)
        good = good_requests()
        answers = [caller.answer(request) for request in good]
        for number in range(REQUESTS):
            index = rng.randrange(len(good))
            caller.send(good[index].method, mutated(good[index], rng))
            if number % GOOD_EVERY == 0:
                caller.send(good[index].method, good[index].data, answers[index])
            if number == SETTLING:
                settled = resident(mutated_server)
        caller.finish()
    grown = resident(mutated_server) - settled
    with capsys.disabled():
        print(  # noqa: T201 - the figures are the purpose of a chaos case
            f"\n{REQUESTS} mutated requests in {time.monotonic() - started:.0f} s: {dict(caller.codes)}, "
            f"memory {grown / MIB:+.1f} MiB after the first {SETTLING}"
        )
    assert caller.wrong == []
    assert " ERROR " not in mutated_server.log.read_text()
    assert grown < MAX_GROWTH_BYTES
