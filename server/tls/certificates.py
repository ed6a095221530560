"""Checks a certificate, its key and the clients' authorities before any connection uses them.

Imported only with TLS: its library is needed for nothing else.
"""

from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from attention_serving.server.errors import ServerError
from attention_serving.server.tls import Certificates, Contents, TlsFiles, server_context

# What gRPC's TLS library takes on both sides.
CURVES = (ec.SECP256R1, ec.SECP384R1)
MIN_RSA_BITS = 2048


def check(files: TlsFiles, contents: Contents) -> Certificates:
    """Checks what was read from files.

    Raises:
        ServerError: A file is not PEM; the key does not belong to the certificate, or is of a kind that gRPC
            does not support; the certificate is not valid now; or every authority has expired.
    """
    chain = _certificates(files.certificate, contents.certificate)
    _check_valid_now(files.certificate, chain[0])
    _check_key(files.certificate, chain[0].public_key())
    authorities = _authorities(files.client_ca, contents.client_ca)
    client_ca = b"".join(each.public_bytes(Encoding.PEM) for each in authorities) or None
    try:
        context = server_context(contents, client_ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ServerError(
            f"{files.certificate}: cannot be used with {files.key}, which must contain the key of its first"
            f" certificate in PEM, without a passphrase: {error}"
        ) from error
    return Certificates(
        contents=contents,
        client_ca=client_ca,
        expires=chain[0].not_valid_after_utc,
        client_ca_expires=max((each.not_valid_after_utc for each in authorities), default=None),
        context=context,
    )


def _certificates(path: Path, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise ServerError(f"{path}: does not contain a certificate in PEM (BEGIN CERTIFICATE)") from error


def _check_key(path: Path, key: object) -> None:
    is_rsa = isinstance(key, rsa.RSAPublicKey) and key.key_size >= MIN_RSA_BITS
    if not is_rsa and not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, CURVES)):
        raise ServerError(
            f"{path}: the key must be an RSA key of at least {MIN_RSA_BITS} bits, or an EC key on P-256 or"
            " P-384: gRPC clients support no others"
        )


def _check_valid_now(path: Path, certificate: x509.Certificate) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begins <= datetime.now(UTC) <= ends:
        raise ServerError(
            f"{path}: the certificate is valid from {begins:%FT%TZ} to {ends:%FT%TZ}, not now;"
            " renew it, or check this machine's clock"
        )


def _authorities(path: Path | None, content: bytes | None) -> list[x509.Certificate]:
    if path is None or content is None:
        return []
    found = _certificates(path, content)
    last = max(each.not_valid_after_utc for each in found)
    if last < datetime.now(UTC):
        raise ServerError(f"{path}: every certificate has expired, the last at {last:%FT%TZ}; renew them")
    return found
