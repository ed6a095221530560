"""The files of a certificate, of its key, and of the clients' authorities.

Does not import the library that reads certificates: without TLS, it is not needed.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypeAlias

from attention_serving.server.threads import read_bytes


class Contents(NamedTuple):
    """What the files contained at one moment, in PEM."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None


@dataclass(frozen=True, eq=False)
class Certificates:
    """Contents that have been checked: see `server.tls.certificates`.

    Attributes:
        contents: What they contained.
        client_ca: The clients' authorities in PEM, without what else the file contains; None requires no
            certificate of clients.
        expires: When the server's certificate ends to be valid.
        client_ca_expires: When the last of the authorities does; None if there are none.
        context: The same for Python's ssl module.
    """

    contents: Contents
    client_ca: bytes | None
    expires: datetime
    client_ca_expires: datetime | None
    context: ssl.SSLContext


# Gives the certificates of the next handshake. For any thread.
CurrentCertificates: TypeAlias = Callable[[], Certificates]
# What is reloaded: see `Reloaded`.
CERTIFICATES = "certificates"


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
