"""The names in a client's certificate, which rights are given to; over gRPC, and over HTTP."""

import http.client
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from attention_serving.server.security.peers import CLIENT, FORWARDED, forward, names_in, read_forwarded
from attention_serving.server.tls import watch
from attention_serving.server.tls.files import TlsFiles
from attention_serving.server.transport import TransportKind
from tests.server.http.scripted import front
from tests.server.seams import PATIENCE_SECONDS
from tests.server.tls.answering import REPLY, Answering
from tests.support.certificates import HOST, Authority, Mounted, client_context, new_key

AUTHORITY, CLIENTS = Authority("server"), Authority("clients")
JOB = CLIENTS.issue("job.example", common_name="A job")


@pytest.mark.parametrize(
    ("names", "common_name", "expected"),
    [
        (["a.example", "b.example"], "A job", ("a.example", "b.example", "A job")),
        (["a.example"], "a.example", ("a.example",)),
        (["spiffe://x/job", "jo@x.example", "::1"], "", ("spiffe://x/job", "jo@x.example", "::1")),
        (["a.example"], "Zoë", ("a.example", "Zoë")),
        (["a.example"], "admin\nroot", ("a.example",)),
    ],
    ids=["both", "same", "other kinds", "unicode", "newline"],
)
def test_names(names: list[str], common_name: str, expected: tuple[str, ...]) -> None:
    pem = CLIENTS.issue(*names, common_name=common_name).certificate
    assert names_in(pem) == expected
    assert names_in(ssl.PEM_cert_to_DER_cert(pem.decode())) == expected
    assert read_forwarded(forward(expected)[1]) == expected


def test_a_name_is_not_cut_off_at_a_zero_byte() -> None:
    key, name, now = new_key(), x509.Name([]), datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(hours=1))
    names = [x509.DNSName("admin\0.other.example"), x509.DNSName("b.example")]
    certificate = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    assert names_in(certificate.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)) == ("b.example",)


def test_what_is_not_a_certificate_or_inside_another_has_no_names() -> None:
    victim = CLIENTS.issue("spiffe://x.example/victim").certificate
    outer = CLIENTS.issue("a.example", f"spiffe://x.example/{victim.decode()}").certificate
    assert "spiffe://x.example/victim" not in names_in(ssl.PEM_cert_to_DER_cert(outer.decode()))
    for content in (b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        assert names_in(content) == ()


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    mounted = Mounted(tmp_path / "tls", AUTHORITY.issue(), CLIENTS.pem)
    return TlsFiles(certificate=mounted.certificate, key=mounted.key, client_ca=mounted.ca)


@pytest.fixture(params=TransportKind, ids=str)
def server(files: TlsFiles, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Answering]:
    server = Answering(request.param, watch(files).current, tmp_path)
    yield server
    server.close()


def call(channel: grpc.Channel, *metadata: tuple[str, str | bytes]) -> None:
    method: Any = channel.unary_unary("/any/Method")
    assert method(b"", timeout=PATIENCE_SECONDS, metadata=metadata) == REPLY


def test_the_private_socket_alone_may_name_another(server: Answering) -> None:
    claim = (forward(["root", "Zoë"]), (CLIENT, "10.0.0.1:7"))
    local = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS)
    with grpc.secure_channel(server.private_socket, local) as channel:
        call(channel, *claim)
        assert server.next_caller() == (("root", "Zoë"), "10.0.0.1:7")
        call(channel)
        assert server.next_caller()[0] == ()
    with grpc.insecure_channel(server.open_socket) as channel:
        call(channel, *claim)
        names, client = server.next_caller()
        assert (names, client == "10.0.0.1:7") == ((), False)
    credentials = grpc.ssl_channel_credentials(AUTHORITY.pem, JOB.key, JOB.certificate)
    with grpc.secure_channel(f"{HOST}:{server.port}", credentials) as channel:
        call(channel, *claim)
        names, client = server.next_caller()
        assert (names, client == "10.0.0.1:7") == (("job.example", "A job"), False)


def test_http_names_its_client(server: Answering, files: TlsFiles, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "tls_certificate": files.certificate,
        "tls_key": files.key,
        "tls_client_ca": files.client_ca,
    }
    with front(server.private_socket, is_private=True, **given) as running:
        context = client_context(AUTHORITY.pem, JOB, tmp_path)
        connection = http.client.HTTPSConnection(HOST, running.port, timeout=30, context=context)
        # A client cannot name itself.
        connection.request("GET", "/v2/health/live", headers={FORWARDED: "WyJyb290Il0=", CLIENT: "1.1.1.1:1"})
        own = connection.sock.getsockname()
        assert connection.getresponse().status == 200
        connection.close()
    assert server.next_caller() == (("job.example", "A job"), f"{own[0]}:{own[1]}")
