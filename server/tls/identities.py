"""The names in a client's certificate, by which rights are given."""

from collections.abc import Iterator
from functools import lru_cache

from cryptography import x509
from cryptography.x509.oid import NameOID

# Certificates whose names are kept: each call of a connection shows the same one.
CACHED = 1024


@lru_cache(CACHED)
def of_pem(certificate: bytes) -> tuple[str, ...]:
    """The names in a certificate whose signature has been verified.

    Args:
        certificate: In PEM.

    Returns:
        DNS names, URIs, e-mail addresses and IP addresses of the subject alternative name, in the order of
        the certificate, and then the common name; each once. Empty names and names with characters that
        cannot be printed are left out. Empty if the certificate cannot be read.
    """
    try:
        return _names(x509.load_pem_x509_certificate(certificate))
    except ValueError:
        return ()


@lru_cache(CACHED)
def of_der(certificate: bytes) -> tuple[str, ...]:
    """As `of_pem`, of a certificate in DER."""
    try:
        return _names(x509.load_der_x509_certificate(certificate))
    except ValueError:
        return ()


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    names = [*_alternative_names(certificate), *_common_names(certificate)]
    return tuple(dict.fromkeys(name for name in names if name and name.isprintable()))


def _alternative_names(certificate: x509.Certificate) -> Iterator[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return
    for name in found:
        if isinstance(name, x509.DNSName | x509.UniformResourceIdentifier | x509.RFC822Name | x509.IPAddress):
            yield str(name.value)


def _common_names(certificate: x509.Certificate) -> Iterator[str]:
    for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME):
        yield attribute.value if isinstance(attribute.value, str) else ""
