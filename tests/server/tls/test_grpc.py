"""TLS of both transports: who may connect, what the server shows, and who a call is from."""

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from attention_serving.server.security.peers import forward
from attention_serving.server.tls import WatchedCertificates, watch
from attention_serving.server.tls.files import TlsFiles
from attention_serving.server.transport import TransportKind
from tests.server.tls.connections import REPLY, Answering, call, call_on, connected
from tests.support.certificates import HOUR, Authority, Mounted, Pair, key_pem, new_key

AUTHORITY, CLIENTS, OTHER = Authority("server"), Authority("clients"), Authority("other")
CLIENT = CLIENTS.issue("job.example", common_name="A job")
RENEWALS = 20


@pytest.fixture(params=TransportKind, ids=str)
def kind(request: pytest.FixtureRequest) -> TransportKind:
    found: TransportKind = request.param
    return found


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path / "tls", AUTHORITY.issue(), CLIENTS.pem)


@pytest.fixture
def reloader(mounted: Mounted) -> WatchedCertificates:
    return watch(TlsFiles(certificate=mounted.certificate, key=mounted.key))


@pytest.fixture
def mutual_reloader(mounted: Mounted) -> WatchedCertificates:
    files = TlsFiles(certificate=mounted.certificate, key=mounted.key, client_ca=mounted.ca)
    return watch(files)


@pytest.fixture
def server(kind: TransportKind, reloader: WatchedCertificates, tmp_path: Path) -> Iterator[Answering]:
    server = Answering(kind, reloader.current, tmp_path)
    yield server
    server.close()


@pytest.fixture
def mutual(kind: TransportKind, mutual_reloader: WatchedCertificates, tmp_path: Path) -> Iterator[Answering]:
    server = Answering(kind, mutual_reloader.current, tmp_path)
    yield server
    server.close()


def refused(port: int, ca: bytes, pair: Pair | None = None) -> str:
    """The details of a call that could not connect."""
    with pytest.raises(grpc.RpcError) as raised:
        call(port, ca, pair)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(raised.value.details())


def test_a_client_that_trusts_the_authority_is_answered(server: Answering) -> None:
    assert call(server.port, AUTHORITY.pem) == REPLY
    assert server.next_identities() == ()


def test_a_client_that_trusts_another_authority_does_not_connect(server: Answering) -> None:
    assert "CERTIFICATE_VERIFY_FAILED" in refused(server.port, OTHER.pem)
    assert server.identities.empty()


def test_a_client_without_tls_does_not_connect(server: Answering) -> None:
    with (
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        call_on(channel)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.identities.empty()


def test_a_certificate_that_is_not_asked_for_names_nobody(server: Answering) -> None:
    assert call(server.port, AUTHORITY.pem, CLIENT) == REPLY
    assert server.next_identities() == ()


def test_a_certificate_of_the_clients_authority_names_the_caller(mutual: Answering) -> None:
    assert call(mutual.port, AUTHORITY.pem, CLIENT) == REPLY
    assert mutual.next_identities() == ("job.example", "A job")


@pytest.mark.parametrize(
    "pair",
    [None, OTHER.issue("job.example"), CLIENTS.issue("job.example", ends=-HOUR)],
    ids=["none", "other authority", "expired"],
)
def test_a_client_without_a_good_certificate_is_refused(mutual: Answering, pair: Pair | None) -> None:
    refused(mutual.port, AUTHORITY.pem, pair)
    assert mutual.identities.empty()


def test_new_connections_see_the_renewed_certificate(
    server: Answering, reloader: WatchedCertificates, mounted: Mounted
) -> None:
    with connected(server.port, AUTHORITY.pem) as before:
        assert call_on(before) == REPLY
        mounted.write(OTHER.issue(), CLIENTS.pem)
        reloader.look()
        assert call_on(before) == REPLY
    assert call(server.port, OTHER.pem) == REPLY
    assert "CERTIFICATE_VERIFY_FAILED" in refused(server.port, AUTHORITY.pem)


def test_renewed_authorities_admit_other_clients(
    mutual: Answering, mutual_reloader: WatchedCertificates, mounted: Mounted
) -> None:
    mounted.write(AUTHORITY.issue(), OTHER.pem)
    mutual_reloader.look()
    assert call(mutual.port, AUTHORITY.pem, OTHER.issue("new.example")) == REPLY
    assert mutual.next_identities() == ("new.example",)
    refused(mutual.port, AUTHORITY.pem, CLIENT)


def test_a_broken_pair_keeps_the_old_one(
    server: Answering, reloader: WatchedCertificates, mounted: Mounted
) -> None:
    mounted.write(Pair(OTHER.issue().certificate, key_pem(new_key())), CLIENTS.pem)
    reloader.look()
    reloader.look()
    assert call(server.port, AUTHORITY.pem) == REPLY


def test_renewals_under_load_fail_no_call(
    mutual: Answering, mutual_reloader: WatchedCertificates, mounted: Mounted
) -> None:
    ended = threading.Event()
    answered, failed = [0, 0], []

    def ask(index: int, *, reconnects: bool) -> None:
        with connected(mutual.port, AUTHORITY.pem, CLIENT) as channel:
            while not ended.is_set():
                try:
                    reply = call(mutual.port, AUTHORITY.pem, CLIENT) if reconnects else call_on(channel)
                    assert reply == REPLY
                    answered[index] += 1
                except Exception as error:
                    failed.append(error)

    threads = [
        threading.Thread(target=ask, args=(index,), kwargs={"reconnects": bool(index)}) for index in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for _ in range(RENEWALS):
        before = [*answered]
        mounted.write(AUTHORITY.issue(), CLIENTS.pem)
        mutual_reloader.look()
        while not failed and any(now - then < 2 for now, then in zip(answered, before, strict=True)):
            ended.wait(0.001)
    ended.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert min(answered) >= 2 * RENEWALS


def test_the_private_socket_alone_may_name_the_client(server: Answering) -> None:
    claim = forward(["job.example", "Zoë"])
    local = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS)
    with grpc.secure_channel(server.private_socket, local) as channel:
        assert call_on(channel, claim) == REPLY
        assert server.next_identities() == ("job.example", "Zoë")
        assert call_on(channel) == REPLY
        assert server.next_identities() == ()
    with grpc.insecure_channel(server.open_socket) as channel:
        assert call_on(channel, claim) == REPLY
        assert server.next_identities() == ()
    with connected(server.port, AUTHORITY.pem) as channel:
        assert call_on(channel, claim) == REPLY
        assert server.next_identities() == ()
