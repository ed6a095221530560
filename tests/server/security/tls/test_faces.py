"""TLS of gRPC, HTTP and metrics: which files are refused, who may connect and as whom, and renewal."""

import http.client
import json
import queue
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from attention_serving.server.api.admission import client_of, peer_identities
from attention_serving.server.errors import ServerError
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.observe.prometheus import MetricsEndpoint
from attention_serving.server.security.peers import CLIENT as CLIENT_KEY
from attention_serving.server.security.peers import FORWARDED, names_in
from attention_serving.server.security.tls import Certificates, TlsFiles, WatchedCertificates, check, watch
from attention_serving.server.settings import Settings, TransportKind
from attention_serving.server.threads import Watched
from attention_serving.server.transport.call import Call
from attention_serving.server.transport.create import create_transport, tls_credentials
from tests.server.http.scripted import Scripted, front
from tests.server.seams import PATIENCE_SECONDS, wait_until
from tests.server.security.samples import looking_often
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
JOB = CLIENTS.issue("job.example", common_name="A job")


# A ServerLiveResponse of a server that lives.
REPLY = b"\x08\x01"


class Answering:
    """A started transport on a port with TLS, on one Unix domain socket and on a private one.

    Attributes:
        port: The port.
        open_socket: The target of the socket that any process may connect to.
        private_socket: The target of the private one.
    """

    def __init__(self, kind: TransportKind, certificates: WatchedCertificates, folder: Path) -> None:
        self._callers: queue.SimpleQueue[tuple[tuple[str, ...], str]] = queue.SimpleQueue()
        self._transport = create_transport(
            Settings.model_validate({"model_repository": folder, "transport": kind})
        )
        self.port = self._transport.listen(f"{HOST}:0", tls_credentials(certificates))
        self.open_socket, self.private_socket = f"unix:{folder}/open", f"unix:{folder}/private"
        self._transport.listen(self.open_socket)
        self._transport.listen(
            self.private_socket, grpc.local_server_credentials(grpc.LocalConnectionType.UDS)
        )
        self._transport.start(self._serve, lambda: False)

    def next_caller(self) -> tuple[tuple[str, ...], str]:
        """The names in the certificate of the next call's client, and its connection."""
        return self._callers.get(timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        self._transport.stop(0, lambda: None)

    async def _serve(self, call: Call) -> None:
        self._callers.put((peer_identities(call), client_of(call)))
        await call.message()
        call.finish(grpc.StatusCode.OK, message=REPLY)


def settings_of(files: TlsFiles) -> dict[str, Any]:
    """The settings of a server with these files."""
    return {"tls_certificate": files.certificate, "tls_key": files.key, "tls_client_ca": files.client_ca}


@contextmanager
def grpc_face(kind: TransportKind, files: TlsFiles, folder: Path) -> Iterator[int]:
    with closing(watch(files)) as watched:
        server = Answering(kind, watched, folder)
        yield server.port
        server.close()


@contextmanager
def http_face(files: TlsFiles, _folder: Path) -> Iterator[int]:
    scripted = Scripted()
    with front(scripted, **settings_of(files)) as running:
        yield running.port
    scripted.close()


@contextmanager
def metrics_face(files: TlsFiles, _folder: Path) -> Iterator[int]:
    with closing(watch(files)) as watched:
        endpoint = MetricsEndpoint(Metrics().registry, HOST, 0, certificates=watched)
        yield endpoint.port
        endpoint.close()


FACES: dict[str, tuple[Face, bytes]] = {
    **{f"grpc {kind}": (partial(grpc_face, kind), PREFACE) for kind in get_args(TransportKind)},
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


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path / "tls", AUTHORITY.issue(), CLIENTS.pem)


@pytest.fixture
def files(mounted: Mounted) -> TlsFiles:
    return TlsFiles(certificate=mounted.certificate, key=mounted.key, client_ca=mounted.ca)


@pytest.mark.parametrize(("face", "hello"), FACES.values(), ids=FACES)
def test_a_face_with_mutual_tls(
    face: Face, hello: bytes, mounted: Mounted, files: TlsFiles, tmp_path: Path
) -> None:

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

        mounted.write(Pair(OTHER.issue().certificate, OTHER.issue().key), CLIENTS.pem)  # of another key
        assert speaks(AUTHORITY.pem, CLIENT)
        renewed = OTHER.issue()
        with connected(port, context(AUTHORITY.pem, CLIENT)) as kept:
            mounted.write(renewed, OTHER.pem)
            wait_until(lambda: speaks(OTHER.pem, NEW_CLIENT))
            kept.sendall(hello)
            assert kept.recv(1)
        both = AUTHORITY.pem + OTHER.pem
        assert presented(port, context(both, NEW_CLIENT)).split() == renewed.certificate.split()
        assert not speaks(both, CLIENT)


def test_metrics_count_renewals_and_state_the_ends(mounted: Mounted, files: TlsFiles) -> None:
    metrics = Metrics()
    watched = Watched("certificates", files.read, partial(check, files), metrics.reloaded)
    mounted.write(AUTHORITY.issue(ends=3 * HOUR), CLIENTS.pem)
    watched.poll_once()
    mounted.write(Pair(b"", b""), CLIENTS.pem)
    for _ in range(3):
        watched.poll_once()
    sample, name = metrics.registry.get_sample_value, "attention_security_reloads_total"
    for result in ("success", "failure"):
        assert sample(name, {"what": "certificates", "result": result}) == 1
    ends = "attention_tls_certificate_expiry_timestamp_seconds"
    assert sample(ends, {"certificate": "server"}) == watched.value.expires.timestamp()
    assert watched.value.client_ca_expires is not None
    assert sample(ends, {"certificate": "client_ca"}) == watched.value.client_ca_expires.timestamp()


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


def test_what_is_not_a_certificate_or_inside_another_has_no_names() -> None:
    cut_off = CLIENTS.issue("admin\0.other.example", "b.example").certificate
    assert names_in(cut_off) == ("b.example",)
    victim = CLIENTS.issue("spiffe://x.example/victim").certificate
    outer = CLIENTS.issue("a.example", f"spiffe://x.example/{victim.decode()}").certificate
    assert "spiffe://x.example/victim" not in names_in(ssl.PEM_cert_to_DER_cert(outer.decode()))
    for content in (b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        assert names_in(content) == ()


@pytest.fixture(params=get_args(TransportKind))
def server(files: TlsFiles, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Answering]:
    with closing(watch(files)) as watched:
        server = Answering(request.param, watched, tmp_path)
        yield server
        server.close()


def call(channel: grpc.Channel, *metadata: tuple[str, str | bytes]) -> None:
    method: Any = channel.unary_unary("/any/Method")
    assert method(b"", timeout=PATIENCE_SECONDS, metadata=metadata) == REPLY


def test_the_private_socket_alone_may_name_another(server: Answering) -> None:
    claim = ((FORWARDED, json.dumps(["root", "Zoë"]).encode()), (CLIENT_KEY, "10.0.0.1:7"))
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
    with front(server.private_socket, tokens="unread", **settings_of(files)) as running:
        context = client_context(AUTHORITY.pem, JOB, tmp_path)
        connection = http.client.HTTPSConnection(HOST, running.port, timeout=30, context=context)
        # A client cannot name itself.
        claim = {FORWARDED: "WyJyb290Il0=", CLIENT_KEY: "1.1.1.1:1"}
        connection.request("GET", "/v2/health/live", headers=claim)
        own = connection.sock.getsockname()
        assert connection.getresponse().status == 200
        connection.close()
    assert server.next_caller() == (("job.example", "A job"), f"{own[0]}:{own[1]}")


GOOD = AUTHORITY.issue()
OTHER_KEY = "tls.key, which must contain the key of its first certificate in PEM, without a passphrase: ["


def load(files: TlsFiles) -> Certificates:
    return check(files, files.read())


def write(folder: Path, pair: Pair = GOOD, ca: bytes | None = None) -> TlsFiles:
    certificate, key, client_ca = folder / "tls.crt", folder / "tls.key", folder / "ca.crt"
    certificate.write_bytes(pair.certificate)
    key.write_bytes(pair.key)
    if ca is not None:
        client_ca.write_bytes(ca)
    return TlsFiles(certificate=certificate, key=key, client_ca=None if ca is None else client_ca)


@pytest.mark.parametrize(
    ("key", "is_taken"),
    [
        (lambda: rsa.generate_private_key(65537, 2048), True),
        (lambda: ec.generate_private_key(ec.SECP384R1()), True),
        (lambda: rsa.generate_private_key(65537, 1024), False),  # noqa: S505 - refused
        (lambda: ec.generate_private_key(ec.SECP521R1()), False),
        (ed25519.Ed25519PrivateKey.generate, False),
    ],
    ids=["rsa", "p384", "rsa 1024", "p521", "ed25519"],
)
def test_keys_that_grpc_supports_are_taken(tmp_path: Path, key: Callable[[], Any], is_taken: bool) -> None:
    files = write(tmp_path, AUTHORITY.issue(key=key()))
    message = "RSA key of at least 2048 bits, or an EC key on P-256 or P-384"
    with nullcontext() if is_taken else pytest.raises(ServerError, match=message):
        assert load(files).contents.client_ca is None


def test_a_chain_and_text_between_its_parts_are_taken(tmp_path: Path) -> None:
    chain = b"Subject: \xc3\xa4\n" + GOOD.certificate + b"\nthe root\n" + AUTHORITY.pem
    found = load(write(tmp_path, Pair(chain, GOOD.key), b"# \xc3\xa4\n" + AUTHORITY.pem))
    assert found.contents.client_ca == AUTHORITY.pem
    assert found.client_ca_expires is not None
    assert found.client_ca_expires <= found.expires


@pytest.mark.parametrize(
    ("pair", "ca", "message"),
    [
        (AUTHORITY.issue(ends=-HOUR), None, "tls.crt: the certificate is valid from 2"),
        (AUTHORITY.issue(begins=HOUR, ends=2 * HOUR), None, "tls.crt: the certificate is valid from 2"),
        (Pair(b"", GOOD.key), None, "tls.crt: does not contain a certificate in PEM"),
        (Pair(GOOD.certificate[:200], GOOD.key), None, "tls.crt: does not contain a certificate in PEM"),
        (Pair(GOOD.certificate, GOOD.key[:60]), None, OTHER_KEY),
        (Pair(GOOD.certificate, key_pem(new_key())), None, OTHER_KEY),
        (Pair(GOOD.certificate, key_pem(new_key(), b"secret")), None, OTHER_KEY),
        (GOOD, b"not PEM", "ca.crt: does not contain a certificate in PEM"),
        (GOOD, Authority(ends=-HOUR).pem, "ca.crt: every certificate has expired, the last at 2"),
    ],
    ids=["expired", "early", "empty", "cut", "cut key", "other key", "passphrase", "no CA", "expired CA"],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, pair: Pair, ca: bytes | None, message: str) -> None:
    with pytest.raises(ServerError, match=f"{tmp_path}/.*") as raised:
        load(write(tmp_path, pair, ca))
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    files = write(tmp_path, GOOD, AUTHORITY.pem)
    (tmp_path / name).unlink()
    with pytest.raises(ServerError, match=f"{name}: cannot be read: No such file or directory"):
        load(files)
