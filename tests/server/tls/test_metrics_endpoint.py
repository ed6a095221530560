"""The port for metrics with TLS."""

import http.client
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from attention_serving.server.observe.prometheus import MetricsEndpoint
from attention_serving.server.tls import WatchedCertificates, watch
from attention_serving.server.tls.files import TlsFiles
from tests.support.certificates import HOST, Authority, Mounted, Pair, client_context, presented

AUTHORITY, CLIENTS, OTHER = Authority("server"), Authority("clients"), Authority("other")
CLIENT = CLIENTS.issue("prometheus.example")
PATIENCE_SECONDS = 60


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path / "tls", AUTHORITY.issue(), CLIENTS.pem)


@pytest.fixture
def reloader(mounted: Mounted) -> WatchedCertificates:
    files = TlsFiles(certificate=mounted.certificate, key=mounted.key, client_ca=mounted.ca)
    return watch(files)


@pytest.fixture
def endpoint(reloader: WatchedCertificates, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsEndpoint]:
    monkeypatch.setattr(MetricsEndpoint, "max_connection_seconds", 1)
    registry = CollectorRegistry()
    Gauge("answer", "The answer.", registry=registry).set(42)
    endpoint = MetricsEndpoint(registry, HOST, 0, certificates=reloader.current)
    yield endpoint
    endpoint.close()


def scrape(port: int, context: ssl.SSLContext) -> bytes:
    connection = http.client.HTTPSConnection(HOST, port, timeout=PATIENCE_SECONDS, context=context)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read()
    finally:
        connection.close()


def test_metrics_are_served(endpoint: MetricsEndpoint, tmp_path: Path) -> None:
    assert b"answer 42.0" in scrape(endpoint.port, client_context(AUTHORITY.pem, CLIENT, tmp_path))


@pytest.mark.parametrize("pair", [None, OTHER.issue("x.example")], ids=["none", "other authority"])
def test_a_client_without_a_good_certificate_is_refused(
    endpoint: MetricsEndpoint, tmp_path: Path, pair: Pair | None
) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        scrape(endpoint.port, client_context(AUTHORITY.pem, pair, tmp_path))


def test_a_client_that_trusts_another_authority_does_not_connect(
    endpoint: MetricsEndpoint, tmp_path: Path
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        scrape(endpoint.port, client_context(OTHER.pem, CLIENT, tmp_path))


def test_an_unencrypted_request_is_not_answered(endpoint: MetricsEndpoint) -> None:
    with socket.create_connection((HOST, endpoint.port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        received = b""
        try:
            while chunk := connection.recv(1000):
                received += chunk
        except ConnectionError:
            pass
    assert b"answer" not in received


def test_new_connections_see_the_renewed_certificate(
    endpoint: MetricsEndpoint, reloader: WatchedCertificates, mounted: Mounted, tmp_path: Path
) -> None:
    renewed, client = OTHER.issue(), OTHER.issue("x.example")
    mounted.write(renewed, OTHER.pem)
    reloader.look()
    context = client_context(OTHER.pem, client, tmp_path)
    assert presented(endpoint.port, context).split() == renewed.certificate.split()
    assert b"answer 42.0" in scrape(endpoint.port, context)


def test_a_silent_handshake_is_ended(endpoint: MetricsEndpoint, tmp_path: Path) -> None:
    with socket.create_connection((HOST, endpoint.port), timeout=PATIENCE_SECONDS) as silent:
        assert silent.recv(1) == b""
    assert b"answer 42.0" in scrape(endpoint.port, client_context(AUTHORITY.pem, CLIENT, tmp_path))
