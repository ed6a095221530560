"""The HTTP process with TLS: who may connect, renewal, and the names that it passes on."""

import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attention_serving.server.http.child import HttpOptions, HttpProcess
from attention_serving.server.security.peers import FORWARDED
from attention_serving.server.settings import Settings
from attention_serving.server.tls import watch
from attention_serving.server.tls.files import TlsFiles
from attention_serving.server.transport import TransportKind
from tests.server.tls.connections import Answering
from tests.support.certificates import HOST, Authority, Mounted, Pair, client_context, presented

AUTHORITY, CLIENTS, OTHER = Authority("server"), Authority("clients"), Authority("other")
CLIENT = CLIENTS.issue("job.example", common_name="A job")
PATIENCE_SECONDS = 60

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path / "tls", AUTHORITY.issue(), CLIENTS.pem)


@pytest.fixture
def backend(mounted: Mounted, tmp_path: Path) -> Iterator[Answering]:
    files = TlsFiles(certificate=mounted.certificate, key=mounted.key)
    server = Answering(TransportKind.COMPLETION_QUEUE, watch(files).current, tmp_path)
    yield server
    server.close()


@pytest.fixture
def front(mounted: Mounted, backend: Answering, tmp_path: Path) -> Iterator[HttpProcess]:
    """The HTTP process of a server with mutual TLS."""
    given = {
        "host": HOST,
        "http_port": 0,
        "worker_timeout_seconds": 0,
        "tls_certificate": mounted.certificate,
    }
    given |= {"model_repository": tmp_path, "tls_key": mounted.key, "tls_client_ca": mounted.ca}
    settings = Settings.model_validate(given)
    private_sockets = (backend.private_socket,)
    process = HttpProcess(HttpOptions(settings=settings, target="", private_sockets=private_sockets))
    process.start()
    yield process
    process.close(PATIENCE_SECONDS)


def ask(port: int, context: ssl.SSLContext, **headers: str) -> int:
    """The status of a request."""
    connection = http.client.HTTPSConnection(HOST, port, timeout=PATIENCE_SECONDS, context=context)
    try:
        connection.request("GET", "/v2/health/live", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def until_presented(port: int, context: ssl.SSLContext, pair: Pair) -> None:
    """Waits until new connections see a certificate, of which the context need not trust the last one."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if presented(port, context).split() == pair.certificate.split():
                return
        except ssl.SSLError:
            pass
        time.sleep(0.05)
    raise AssertionError("the certificate was not renewed in time")


def test_the_names_of_the_client_reach_the_server(
    front: HttpProcess, backend: Answering, tmp_path: Path
) -> None:
    context = client_context(AUTHORITY.pem, CLIENT, tmp_path)
    claim = {FORWARDED: "WyJyb290Il0="}  # a client cannot name itself
    assert ask(front.port, context, **claim) == 200
    assert backend.next_identities() == ("job.example", "A job")


@pytest.mark.parametrize("pair", [None, OTHER.issue("job.example")], ids=["none", "other authority"])
def test_a_client_without_a_good_certificate_is_refused(
    front: HttpProcess, backend: Answering, tmp_path: Path, pair: Pair | None
) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        ask(front.port, client_context(AUTHORITY.pem, pair, tmp_path))
    assert backend.identities.empty()


def test_a_client_that_trusts_another_authority_does_not_connect(front: HttpProcess, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"self-signed|unable to get local issuer"):
        ask(front.port, client_context(OTHER.pem, CLIENT, tmp_path))


def test_renewed_files_are_taken(front: HttpProcess, mounted: Mounted, tmp_path: Path) -> None:
    context = client_context(AUTHORITY.pem, CLIENT, tmp_path)
    keeps = http.client.HTTPSConnection(HOST, front.port, timeout=PATIENCE_SECONDS, context=context)
    keeps.request("GET", "/v2/health/live")
    keeps.getresponse().read()
    renewed, new_client = OTHER.issue(), OTHER.issue("new.example")
    mounted.write(renewed, OTHER.pem)
    until_presented(front.port, client_context(OTHER.pem, new_client, tmp_path), renewed)
    # Whoever the old authorities have signed is refused now, on new connections.
    both = client_context(AUTHORITY.pem + OTHER.pem, CLIENT, tmp_path)
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        ask(front.port, both)
    keeps.request("GET", "/v2/health/live")
    assert keeps.getresponse().status == 200
    keeps.close()


def test_a_session_cannot_be_resumed(front: HttpProcess, tmp_path: Path) -> None:
    context = client_context(AUTHORITY.pem, CLIENT, tmp_path)
    with (
        socket.create_connection((HOST, front.port)) as connection,
        context.wrap_socket(connection, server_hostname=HOST) as encrypted,
    ):
        encrypted.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        while encrypted.recv(1000):
            pass
        assert encrypted.session is None or not encrypted.session.has_ticket
    old = client_context(AUTHORITY.pem, CLIENT, tmp_path)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        presented(front.port, old)


def test_an_unencrypted_request_is_not_answered(front: HttpProcess, backend: Answering) -> None:
    connection = http.client.HTTPConnection(HOST, front.port, timeout=PATIENCE_SECONDS)
    connection.request("GET", "/v2/health/live")
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        connection.getresponse()
    connection.close()
    assert backend.identities.empty()


def test_idle_connections_do_not_delay_the_end(
    front: HttpProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = client_context(AUTHORITY.pem, CLIENT, tmp_path)
    idle = http.client.HTTPSConnection(HOST, front.port, timeout=PATIENCE_SECONDS, context=context)
    idle.request("GET", "/v2/health/live")
    idle.getresponse().read()
    with socket.create_connection((HOST, front.port)):  # its handshake has not begun
        front.drain()
        assert idle.sock is not None
        assert idle.sock.recv(1) == b""
        front.close(20)  # less than asyncio waits by default
    assert "http process killed" not in caplog.text
    idle.close()
