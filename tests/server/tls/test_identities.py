"""The names in a client's certificate."""

import ssl
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from attention_serving.server.security.peers import forward, names_in, read_forwarded
from tests.support.certificates import Authority, new_key

AUTHORITY = Authority()


@pytest.mark.parametrize(
    ("names", "common_name", "expected"),
    [
        (["a.example"], "", ("a.example",)),
        (["a.example", "b.example"], "A job", ("a.example", "b.example", "A job")),
        (["a.example"], "a.example", ("a.example",)),
        (
            ["spiffe://x.example/job", "jo@x.example", "10.0.0.1", "::1"],
            "",
            ("spiffe://x.example/job", "jo@x.example", "10.0.0.1", "::1"),
        ),
        (["a.example"], "Zoë", ("a.example", "Zoë")),
        (["a.example"], "admin\nroot", ("a.example",)),
    ],
    ids=["dns", "both", "same", "other kinds", "unicode", "newline"],
)
def test_names(names: list[str], common_name: str, expected: tuple[str, ...]) -> None:
    pem = AUTHORITY.issue(*names, common_name=common_name).certificate
    assert names_in(pem) == expected
    assert names_in(ssl.PEM_cert_to_DER_cert(pem.decode())) == expected
    assert read_forwarded(forward(expected)[1]) == expected


def test_a_name_is_not_cut_off_at_a_zero_byte() -> None:
    key, name, now = new_key(), x509.Name([]), datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(hours=1))
    names = [x509.DNSName("admin\0.other.example"), x509.DNSName("b.example")]
    certificate = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    pem = certificate.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    assert names_in(pem) == ("b.example",)


def test_a_certificate_inside_another_names_nobody() -> None:
    victim = AUTHORITY.issue("spiffe://x.example/victim").certificate
    outer = AUTHORITY.issue("a.example", f"spiffe://x.example/{victim.decode()}").certificate
    der = ssl.PEM_cert_to_DER_cert(outer.decode())
    assert victim in der
    assert "spiffe://x.example/victim" not in names_in(der)


@pytest.mark.parametrize("content", [b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_what_is_not_a_certificate_has_no_names(content: bytes) -> None:
    assert names_in(content) == ()
