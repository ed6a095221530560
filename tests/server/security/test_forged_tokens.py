"""A flood of forged JSON Web Tokens does not keep callers away whose tokens the server has not seen yet."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from scripts.local_server import serving
from tests.server.http.clients import HOST, answer_on, ask, connected, head, http_port
from tests.server.security.samples import AUDIENCE, ISSUER, key_set, public_jwk, signed

NEWCOMERS = 40
IN_FLIGHT = 16
# Failed tokens that the flood sends before the newcomers come: more than may fail in a second.
FIRST = 500
METADATA = "/inference.GRPCInferenceService/ServerMetadata"
NUMBERS = itertools.count()


class Ports(NamedTuple):
    """Where the server listens."""

    grpc: int
    http: int


@pytest.fixture(scope="module")
def ports(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    folder = tmp_path_factory.mktemp("forged")
    keys = folder / "keys.json"
    keys.write_bytes(key_set(public_jwk("RS256")))
    options = (f"--jwt-jwks={keys}", f"--jwt-issuer={ISSUER}", f"--jwt-audience={AUDIENCE}", "--http-port=0")
    with serving(artifacts, folder / "log", *options) as process:
        yield Ports(process.port, http_port(process.log))


class Flood:
    """Sends forged tokens until it is ended; each token is another one."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._stem = signed()[:-12]
        self._ended = threading.Event()
        self.failed = threading.Semaphore(0)

    def token(self) -> str:
        return f"Bearer {self._stem}{next(NUMBERS):011d}A"

    def over_grpc(self) -> None:
        """One connection, on which calls are in flight all the time."""
        with channel(self._ports.grpc) as connection:
            call = connection.unary_unary(METADATA)
            while not self._ended.is_set():
                metadata = [(("authorization", self.token()),) for _ in range(IN_FLIGHT)]
                for each in [call.future(b"", metadata=pairs, timeout=60) for pairs in metadata]:
                    assert each.code() in (
                        grpc.StatusCode.UNAUTHENTICATED,
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                    )
                    self.failed.release()

    def over_http(self) -> None:
        """One connection, on which one request follows another."""
        with connected(self._ports.http) as connection:
            while not self._ended.is_set():
                connection.sendall(head("/v2", f"Authorization: {self.token()}", method="GET"))
                assert answer_on(connection).status in (401, 429)
                self.failed.release()

    @contextmanager
    def running(self, way: str) -> Iterator[None]:
        """Floods while the block runs, which begins once many tokens have failed."""
        senders = [self.over_http] * 4 if way == "http" else [self.over_grpc]
        threads = [threading.Thread(target=send) for send in senders]
        for thread in threads:
            thread.start()
        try:
            for _ in range(FIRST):
                assert self.failed.acquire(timeout=60)
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()


@contextmanager
def channel(port: int) -> Iterator[Any]:
    """A connection of its own."""
    with grpc.insecure_channel(f"{HOST}:{port}", [("grpc.use_local_subchannel_pool", 1)]) as connection:
        yield connection


def is_served_over_grpc(ports: Ports, token: str) -> bool:
    with channel(ports.grpc) as connection:
        call = connection.unary_unary(METADATA)
        code = call.future(b"", metadata=(("authorization", token),), timeout=60).code()
        return bool(code is grpc.StatusCode.OK)


def is_served_over_http(ports: Ports, token: str) -> bool:
    return ask(ports.http, "/v2", headers={"Authorization": token}).status == 200


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_newcomers_are_served_during_a_flood_from_their_own_address(ports: Ports, way: str) -> None:
    is_served = is_served_over_http if way == "http" else is_served_over_grpc
    honest = [f"Bearer {signed(sub=f'{way}-{number}')}" for number in range(NEWCOMERS)]
    with Flood(ports).running(way):
        served = [is_served(ports, token) for token in honest]
    assert served.count(True) == NEWCOMERS
