"""Certificates as an authority issues them, and files of them as an operator stores and renews them."""

import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes as Key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

HOST = "127.0.0.1"
HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key, password: bytes | None = None) -> bytes:
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def general_name(name: str) -> x509.GeneralName:
    """An IP address, a URI, an e-mail address or a DNS name, by its form."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    return x509.RFC822Name(name) if "@" in name else x509.DNSName(name)


class Authority:
    """Signs certificates. Authorities of the same name are different ones.

    Attributes:
        pem: Its own certificate.
    """

    def __init__(self, name: str = "tests", ends: timedelta = HOUR) -> None:
        self._key = new_key()
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = x509.BasicConstraints(ca=True, path_length=None)
        self.pem = self._sign(self._name, self._key, own, (-2 * HOUR, ends))

    def issue(
        self,
        *names: str,
        common_name: str = "",
        begins: timedelta = -2 * HOUR,
        ends: timedelta = HOUR,
        key: Key | None = None,
    ) -> Pair:
        """A certificate for some names, by default those of a server on loopback.

        Args:
            names: Subject alternative names.
            common_name: Common name of the subject; empty for none.
            begins: When it begins to be valid, from now.
            ends: When it ends.
            key: Its key; None makes one.
        """
        key = key or new_key()
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else []
        alternative = x509.SubjectAlternativeName(map(general_name, names or (HOST, "localhost")))
        return Pair(self._sign(x509.Name(subject), key, alternative, (begins, ends)), key_pem(key))

    def _sign(
        self, subject: x509.Name, key: Key, extension: x509.ExtensionType, valid: tuple[timedelta, timedelta]
    ) -> bytes:
        now, (begins, ends) = datetime.now(UTC), valid
        builder = (
            x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(extension, critical=True)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


class Mounted:
    """Files in a folder as Kubernetes mounts a secret: links to links, of which one is changed.

    Attributes:
        certificate: Path of the certificate.
        key: Path of its key.
        ca: Path of authorities.
    """

    def __init__(self, folder: Path, pair: Pair, ca: bytes) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._versions = 0
        self.write(pair, ca)
        self.certificate, self.key, self.ca = folder / "tls.crt", folder / "tls.key", folder / "ca.crt"
        for path in (self.certificate, self.key, self.ca):
            path.symlink_to(Path("..data") / path.name)

    def write(self, pair: Pair, ca: bytes) -> None:
        """Replaces all of them at one moment."""
        self._versions += 1
        version = self._folder / f"..{self._versions}"
        version.mkdir()
        for name, content in (("tls.crt", pair.certificate), ("tls.key", pair.key), ("ca.crt", ca)):
            (version / name).write_bytes(content)
        link = self._folder / "..data_tmp"
        link.symlink_to(version.name)
        os.replace(link, self._folder / "..data")  # noqa: PTH105 - of the link itself

    @property
    def options(self) -> list[str]:
        """The server's options, with mutual TLS."""
        return [*self.server_options, f"--tls-client-ca={self.ca}"]

    @property
    def server_options(self) -> list[str]:
        """The server's options, without it."""
        return [f"--tls-certificate={self.certificate}", f"--tls-key={self.key}"]


def client_context(ca: bytes, pair: Pair | None = None, folder: Path | None = None) -> ssl.SSLContext:
    """A context of Python's ssl module for a client, with a certificate that is written to a folder."""
    context = ssl.create_default_context(cadata=ca.decode())
    if pair is not None and folder is not None:
        file = folder / "client.pem"
        file.write_bytes(pair.certificate + pair.key)
        context.load_cert_chain(file)
    return context


def presented(port: int, context: ssl.SSLContext) -> bytes:
    """The certificate that a server shows in a handshake that verifies it, in PEM."""
    with (
        socket.create_connection((HOST, port), timeout=60) as connection,
        context.wrap_socket(connection, server_hostname=HOST) as encrypted,
    ):
        found = encrypted.getpeercert(binary_form=True)
        assert found
        return ssl.DER_cert_to_PEM_cert(found).encode()
