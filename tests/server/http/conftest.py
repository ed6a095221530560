"""Fixtures of the tests of HTTP: a scripted gRPC server, and an HTTP server in front of it, both shared."""

from collections.abc import Iterator

import pytest

from tests.server.http.clients import MAX_BYTES, PLACES
from tests.server.http.scripted import Front, Scripted, front


@pytest.fixture(scope="session")
def shared_scripted() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


@pytest.fixture(scope="session")
def shared_front(shared_scripted: Scripted) -> Iterator[Front]:
    with front(shared_scripted, max_message_bytes=MAX_BYTES, max_concurrent_calls=PLACES) as running:
        yield running


@pytest.fixture
def scripted(shared_scripted: Scripted) -> Scripted:
    """The scripted server, as if it were new."""
    shared_scripted.behaviours.clear()
    while not shared_scripted.calls.empty():
        shared_scripted.calls.get()
    return shared_scripted


@pytest.fixture
def port(shared_front: Front) -> int:
    """The port of the HTTP server in front of it."""
    return shared_front.port
