"""Which certificates, keys and authorities are refused, and why."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from attention_serving.server.errors import ServerError
from attention_serving.server.security.tls import Certificates, TlsFiles, check
from tests.support.certificates import HOUR, Authority, Pair, key_pem, new_key

AUTHORITY = Authority()
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
