"""The client's certificates: checked when it is created, and renewed while it lives."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_client import AttentionClient, TlsFiles, errors
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from grpc_server import Service, running

from tests.clients.tls_server import TlsServer, tls_server
from tests.support.certificates import Authority, Mounted, Pair, key_pem, new_key

OLD, NEW = Authority("old"), Authority("new")
ROWS = np.ones((2, 3), dtype=np.float32)


@pytest.fixture
def server() -> Iterator[TlsServer]:
    with tls_server(OLD.pem + NEW.pem) as server:
        yield server


@pytest.fixture
def mounted(server: TlsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mounted:
    """The client's files, which are looked at with each call."""
    monkeypatch.setattr("attention_client._connection.tls.CHECK_SECONDS", 0)
    return Mounted(tmp_path / "client", OLD.issue("old.example"), server.ca)


@pytest.fixture
def files(mounted: Mounted) -> TlsFiles:
    return TlsFiles(ca=mounted.ca, certificate=str(mounted.certificate), key=mounted.key)


def test_a_client_shows_its_certificate_and_is_refused_without(server: TlsServer, files: TlsFiles) -> None:
    targets = [server.target.replace("127.0.0.1", "localhost"), server.target]
    with AttentionClient(targets, credentials=files, token="secret") as client:  # noqa: S106
        assert client.is_ready()
        client.models()
    assert server.callers == [("old.example", "Bearer secret")]
    bare: Any = {"credentials": TlsFiles(ca=files.ca), "wait_for_ready": False, "max_retries": 0}
    expected = r"certificates, pass one that it accepts: .*\(certificate=FILE, key=FILE\)"
    with (
        AttentionClient(server.target, **bare) as client,
        pytest.raises(errors.UnavailableError, match=expected),
    ):
        client.models()


def test_an_encrypting_client_of_a_plain_server_and_the_reverse_are_told_apart(server: TlsServer) -> None:
    bare = AttentionClient(server.target, max_retries=0, timeout=5)
    with bare, pytest.raises(errors.AttentionClientError, match=r"pass credentials=TlsFiles\(ca=FILE\)"):
        bare.models()
    expected = "the server does not use TLS: omit credentials"
    with running(Service()) as target, pytest.raises(errors.AttentionClientError, match=expected):  # type: ignore[abstract]
        AttentionClient(target, credentials=TlsFiles(), timeout=0.5).models()


def test_renewed_files_are_used_without_a_new_client_unless_they_cannot_be_used(
    server: TlsServer, mounted: Mounted, files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with AttentionClient(server.target, credentials=files) as client:
        mounted.write(Pair(b"", b""), server.ca)
        client.models()
        assert "renewed certificates are not used" in caplog.text
        mounted.write(NEW.issue("new.example"), server.ca)
        client.models()
        client.models()
        assert len(client._channels) == 1  # the first is closed
    assert [name for name, _ in server.callers] == ["old.example", "new.example", "new.example"]


def test_a_stream_outlives_a_renewal(server: TlsServer, mounted: Mounted, files: TlsFiles) -> None:
    more = threading.Event()

    def queries() -> Iterator[Any]:
        yield ROWS
        assert more.wait(60)
        yield 2 * ROWS

    with AttentionClient(server.target, credentials=files) as client:
        stream = client.attend_stream("m", queries())
        np.testing.assert_array_equal(next(stream).context_vectors, ROWS)
        mounted.write(OLD.issue("second.example"), server.ca)
        client.models()
        more.set()
        np.testing.assert_array_equal(next(stream).context_vectors, 2 * ROWS)
    assert [name for name, _ in server.callers] == ["old.example", "second.example"]


def test_files_that_cannot_be_used_are_refused(mounted: Mounted, files: TlsFiles) -> None:
    pair, target = OLD.issue(), "127.0.0.1:1"
    key: Any = load_pem_private_key(pair.key, None)
    for given, message in (
        (Pair(b"", pair.key), "must hold certificates in PEM, and the certificate's key without"),
        (Pair(pair.certificate, key_pem(new_key())), "KEY_VALUES_MISMATCH"),
        (Pair(pair.certificate, key_pem(key, b"secret")), "key without a passphrase"),
    ):
        mounted.write(given, OLD.pem)
        with pytest.raises(errors.InvalidArgumentError, match=message) as raised:
            AttentionClient(target, credentials=files)
        assert raised.value.field == "credentials"
    with pytest.raises(errors.InvalidArgumentError, match=r"tls.key: must hold certificates in PEM"):
        AttentionClient(target, credentials=TlsFiles(ca=mounted.key))
    with pytest.raises(errors.InvalidArgumentError, match="No such file or directory: 'absent'"):
        AttentionClient(target, credentials=TlsFiles(ca="absent"))
    for options in ({"certificate": mounted.certificate}, {"key": mounted.key}):
        with pytest.raises(errors.InvalidArgumentError, match="the files of certificate and key, or neither"):
            TlsFiles(**options)
