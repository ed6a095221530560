"""Fixtures of the tests of HTTP: a server with an HTTP port, and a process in front of a scripted server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.local_server import ServerProcess, serving
from tests.server.http.clients import HOST, http_port
from tests.server.http.scripted import Front, Scripted, front


@pytest.fixture(scope="session")
def small_server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the small artifacts with an HTTP port."""
    log = tmp_path_factory.mktemp("http") / "log"
    with serving(artifacts, log, "--http-port=0") as process:
        yield process


@pytest.fixture(scope="session")
def port(small_server: ServerProcess) -> int:
    """Its HTTP port."""
    return http_port(small_server.log)


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.close()


@pytest.fixture
def scripted_front(scripted: Scripted) -> Iterator[Front]:
    """An HTTP process in front of the scripted server, with small limits."""
    options = (
        "--max-message-bytes=1MiB",
        "--max-concurrent-requests=2",
        "--max-connections=8",
        "--message-timeout-seconds=1",
    )
    with front(f"{HOST}:{scripted.port}", *options) as process:
        yield process


@pytest.fixture(scope="session")
def shared_scripted() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


@pytest.fixture(scope="session")
def shared_front(shared_scripted: Scripted) -> Iterator[Front]:
    with front(f"{HOST}:{shared_scripted.port}") as process:
        yield process


@pytest.fixture
def server(shared_scripted: Scripted) -> Scripted:
    """A scripted server that many tests share, as if it were new."""
    shared_scripted.behaviours.clear()
    while not shared_scripted.calls.empty():
        shared_scripted.calls.get()
    return shared_scripted


@pytest.fixture
def front_port(shared_front: Front) -> int:
    """The port of the HTTP process in front of it."""
    return shared_front.port
