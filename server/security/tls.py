"""TLS of the three listeners, gRPC, HTTP and metrics: certificates, checked before they are used."""

import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from attention_serving.server.errors import ServerError
from attention_serving.server.threads import Reloaded, Watched, read_bytes, unreported


class Contents(NamedTuple):
    """What the files contained at one moment, in PEM.

    Attributes:
        certificate: The server's certificate, and those of the authorities between it and the root.
        key: Its private key.
        client_ca: The clients' authorities; None requires no certificate of clients.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes | None


@dataclass(frozen=True, eq=False)
class Certificates:
    """Contents that have been checked: see `check`.

    Attributes:
        contents: What they contained, without what else the file of the clients' authorities contains.
        expires: When the server's certificate ends to be valid.
        client_ca_expires: When the last of the authorities does; None if there are none.
        context: The same for Python's ssl module.
    """

    contents: Contents
    expires: datetime
    client_ca_expires: datetime | None
    context: ssl.SSLContext


# Its value is for the next handshake. For any thread.
WatchedCertificates: TypeAlias = Watched[Contents, Certificates]
# What is reloaded: see `Reloaded`.
CERTIFICATES = "certificates"
# What gRPC's TLS library takes on both sides.
CURVES, MIN_RSA_BITS = ("secp256r1", "secp384r1"), 2048


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Paths.

    Attributes:
        certificate: The server's certificate, and after it those of the authorities between it and the root.
        key: Its private key, without a passphrase.
        client_ca: Authorities of the clients' certificates; None requires no certificate of clients.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def read(self) -> Contents:
        """Reads all of them, through symbolic links.

        Raises:
            ServerError: One of them cannot be read.
        """
        client_ca = read_bytes(self.client_ca) if self.client_ca else None
        return Contents(read_bytes(self.certificate), read_bytes(self.key), client_ca)


def check(files: TlsFiles, contents: Contents) -> Certificates:
    """Checks what was read from files.

    Raises:
        ServerError: A file is not PEM; the key does not belong to the certificate, or is of a kind that gRPC
            does not support; the certificate is not valid now; or every authority has expired.
    """
    # A library that is needed with TLS only.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415

    def parsed(path: Path, content: bytes) -> list[x509.Certificate]:
        try:
            return x509.load_pem_x509_certificates(content)
        except ValueError as error:
            raise ServerError(f"{path}: does not contain a certificate in PEM (BEGIN CERTIFICATE)") from error

    certificate, now = parsed(files.certificate, contents.certificate)[0], datetime.now(UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    key = certificate.public_key()
    if not begins <= now <= ends:
        reason = f"the certificate is valid from {begins:%FT%TZ} to {ends:%FT%TZ}, not now"
        raise ServerError(f"{files.certificate}: {reason}; renew it, or check this machine's clock")
    is_rsa = isinstance(key, rsa.RSAPublicKey) and key.key_size >= MIN_RSA_BITS
    if not is_rsa and not (isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in CURVES):
        kinds = f"an RSA key of at least {MIN_RSA_BITS} bits, or an EC key on P-256 or P-384"
        raise ServerError(f"{files.certificate}: the key must be {kinds}: gRPC clients support no others")
    last = None
    if files.client_ca is not None and contents.client_ca is not None:
        authorities = parsed(files.client_ca, contents.client_ca)
        encoded = b"".join(authority.public_bytes(Encoding.PEM) for authority in authorities)
        contents = contents._replace(client_ca=encoded)
        last = max(authority.not_valid_after_utc for authority in authorities)
        if last < now:
            expired = f"every certificate has expired, the last at {last:%FT%TZ}; renew them"
            raise ServerError(f"{files.client_ca}: {expired}")
    try:
        context = server_context(contents)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ServerError(
            f"{files.certificate}: cannot be used with {files.key}, which must contain the key of its first"
            f" certificate in PEM, without a passphrase: {error}"
        ) from error
    return Certificates(contents, ends, last, context)


def watch(files: TlsFiles, reloaded: Reloaded = unreported) -> WatchedCertificates:
    """The certificates of files, which a thread follows from now on.

    Raises:
        ServerError: The files cannot be used.
    """
    return Watched(CERTIFICATES, files.read, partial(check, files), reloaded).start()


def server_context(contents: Contents) -> ssl.SSLContext:
    """A context of connections that clients make.

    If there are authorities, each client must show a certificate of theirs, and use TLS 1.3.

    Raises:
        ssl.SSLError: OpenSSL does not take them.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A resumed session would bypass the check of the client's certificate by renewed authorities. With
    # TLS 1.3, sessions can be resumed by tickets only.
    context.minimum_version = ssl.TLSVersion.TLSv1_2 if contents.client_ca is None else ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    # A file that only this process can open: the ssl module takes certificates from files only.
    with os.fdopen(os.memfd_create("certificate"), "wb") as file:
        file.write(contents.certificate + b"\n" + contents.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")
    if contents.client_ca is not None:
        context.load_verify_locations(cadata=contents.client_ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def renewing_context(certificates: WatchedCertificates) -> ssl.SSLContext:
    """A context that a listener keeps for good, and whose handshakes use the current certificates.

    To load a renewed certificate into a context in use is not enough: its authorities can only be added to,
    and a pair that turns out to be broken is half loaded by then.
    """
    context = server_context(certificates.value.contents)

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = certificates.value.context

    # Called in every handshake, whether or not the client names a server.
    context.sni_callback = choose
    return context
