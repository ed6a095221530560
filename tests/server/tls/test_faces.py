"""TLS of gRPC, HTTP and metrics alike: who may connect, what the server shows, and renewal."""

import http.client
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.observe.prometheus import MetricsEndpoint
from attention_serving.server.tls import watch
from attention_serving.server.tls.files import TlsFiles
from attention_serving.server.transport import TransportKind
from tests.server.http.scripted import Scripted, front
from tests.server.security.samples import eventually, looking_often
from tests.server.tls.answering import Answering
from tests.support.certificates import (
    HOST,
    HOUR,
    Authority,
    Mounted,
    Pair,
    client_context,
    key_pem,
    new_key,
    presented,
)

AUTHORITY, CLIENTS, OTHER = Authority("server"), Authority("clients"), Authority("other")
CLIENT, NEW_CLIENT = CLIENTS.issue("job.example"), OTHER.issue("new.example")
# What a client of gRPC says first: the preface of HTTP/2 and empty settings; and one of HTTP.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"
REFUSED = (ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)
Face = Callable[[TlsFiles, Path], AbstractContextManager[int]]


@contextmanager
def grpc_face(kind: TransportKind, files: TlsFiles, folder: Path) -> Iterator[int]:
    watched = watch(files)
    watched.start()
    server = Answering(kind, watched.current, folder)
    yield server.port
    server.close()
    watched.close()


@contextmanager
def http_face(files: TlsFiles, _folder: Path) -> Iterator[int]:
    scripted = Scripted()
    given: dict[str, Any] = {
        "tls_certificate": files.certificate,
        "tls_key": files.key,
        "tls_client_ca": files.client_ca,
    }
    with front(scripted, **given) as running:
        yield running.port
    scripted.close()


@contextmanager
def metrics_face(files: TlsFiles, _folder: Path) -> Iterator[int]:
    watched = watch(files)
    watched.start()
    endpoint = MetricsEndpoint(Metrics().registry, HOST, 0, certificates=watched.current)
    yield endpoint.port
    endpoint.close()
    watched.close()


FACES: dict[str, tuple[Face, bytes]] = {
    **{f"grpc {kind}": (partial(grpc_face, kind), PREFACE) for kind in TransportKind},
    "http": (http_face, GET),
    "metrics": (metrics_face, GET),
}


@contextmanager
def connected(port: int, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection((HOST, port), timeout=30) as connection,
        context.wrap_socket(connection, server_hostname=HOST) as encrypted,
    ):
        yield encrypted


@pytest.mark.parametrize(("face", "hello"), FACES.values(), ids=FACES)
def test_a_face_with_mutual_tls(face: Face, hello: bytes, tmp_path: Path) -> None:
    mounted = Mounted(tmp_path / "tls", AUTHORITY.issue(), CLIENTS.pem)
    files = TlsFiles(certificate=mounted.certificate, key=mounted.key, client_ca=mounted.ca)

    def context(ca: bytes, pair: Pair | None) -> ssl.SSLContext:
        found = client_context(ca, pair, tmp_path)
        found.set_alpn_protocols(["h2"] if hello is PREFACE else ["http/1.1"])
        return found

    def speaks(ca: bytes, pair: Pair | None) -> bool:
        try:
            with connected(port, context(ca, pair)) as connection:
                connection.sendall(hello)
                return connection.recv(1) != b""
        except REFUSED:
            return False

    with looking_often(), face(files, tmp_path) as port:
        assert speaks(AUTHORITY.pem, CLIENT)
        for pair in (None, OTHER.issue("job.example"), CLIENTS.issue("job.example", ends=-HOUR)):
            assert not speaks(AUTHORITY.pem, pair)
        with pytest.raises(ssl.SSLCertVerificationError):
            presented(port, context(OTHER.pem, CLIENT))
        with socket.create_connection((HOST, port)) as plain, suppress(ConnectionError):
            plain.sendall(hello)
            assert b"200 OK" not in plain.recv(100)
        if hello is GET:  # gRPC takes TLS 1.2 too
            old = context(AUTHORITY.pem, CLIENT)
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises(ssl.SSLError):
                presented(port, old)

        broken = Pair(OTHER.issue().certificate, key_pem(new_key()))
        mounted.write(broken, CLIENTS.pem)
        assert speaks(AUTHORITY.pem, CLIENT)
        renewed = OTHER.issue()
        with connected(port, context(AUTHORITY.pem, CLIENT)) as kept:
            mounted.write(renewed, OTHER.pem)
            assert eventually(lambda: speaks(OTHER.pem, NEW_CLIENT))
            kept.sendall(hello)
            assert kept.recv(1)
        both = AUTHORITY.pem + OTHER.pem
        assert presented(port, context(both, NEW_CLIENT)).split() == renewed.certificate.split()
        assert not speaks(both, CLIENT)


def test_metrics_count_renewals_and_state_the_ends(tmp_path: Path) -> None:
    metrics = Metrics()
    mounted = Mounted(tmp_path / "tls", AUTHORITY.issue(), CLIENTS.pem)
    files = TlsFiles(certificate=mounted.certificate, key=mounted.key, client_ca=mounted.ca)
    watched = watch(files, metrics.reloaded)
    mounted.write(AUTHORITY.issue(ends=3 * HOUR), CLIENTS.pem)
    watched.look()
    mounted.write(Pair(b"", b""), CLIENTS.pem)
    for _ in range(3):
        watched.look()
    sample, name = metrics.registry.get_sample_value, "attention_tls_reloads_total"
    assert [sample(name, {"result": each}) for each in ("ok", "failed")] == [1, 1]
    ends = "attention_tls_certificate_expiry_timestamp_seconds"
    assert sample(ends, {"certificate": "server"}) == watched.value.expires.timestamp()
    assert watched.value.client_ca_expires is not None
    assert sample(ends, {"certificate": "client_ca"}) == watched.value.client_ca_expires.timestamp()
