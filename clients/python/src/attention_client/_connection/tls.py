"""Certificates that are read from files, and read again when the files change."""

import logging
import os
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import grpc

from attention_client.errors import InvalidArgumentError, invalid

log = logging.getLogger(__name__)

# How often the files are looked at, at most, and only when a call begins.
CHECK_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of an encrypted connection. Renewed files are used without a new client.

    gRPC itself takes certificates only when a channel is created. So the client looks at the files when a
    call begins, every two seconds at most. If they have changed and can be used, it creates another channel
    for this call and all later ones; calls in progress end on the old one. Until then, a lost connection is
    made again with the old files.

    Args:
        ca: Authorities that may have signed the server's certificate; None means those that gRPC finds on
            this machine or has built in.
        certificate: The client's own certificate, for servers with mutual TLS, and after it those of the
            authorities between it and the root.
        key: Its private key, without a passphrase.

    Raises:
        InvalidArgumentError: Only one of `certificate` and `key` is given.
    """

    ca: str | PathLike[str] | None = None
    certificate: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            missing = "key" if self.key is None else "certificate"
            raise invalid(missing, "the files of certificate and key, or neither", None)


def tls_files(
    ca: Path | None, certificate: Path | None, key: Path | None, *, tls: bool = False
) -> TlsFiles | None:
    """The files that a command line names; None if it asks for no encryption."""
    if not tls and ca is certificate is key is None:
        return None
    return TlsFiles(ca=ca, certificate=certificate, key=key)


def _state(files: TlsFiles) -> list[tuple[int, int, int]]:
    """What changes with the content of files, also if they are renewed by a change of symbolic links."""
    states = []
    for path in (files.ca, files.certificate, files.key):
        with suppress(OSError):
            stat = Path(os.devnull if path is None else path).stat()
            states.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return states


def _load(files: TlsFiles) -> grpc.ChannelCredentials:
    """Finds what gRPC would report only when it connects, and without the names of the files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    paths = (files.ca, files.key, files.certificate)
    try:
        contents = [None if path is None else Path(path).read_bytes() for path in paths]
        if files.ca is not None:
            context.load_verify_locations(files.ca)
        if files.certificate is not None:
            # The password of an encrypted key: without one, the terminal would be asked.
            context.load_cert_chain(files.certificate, files.key, password="")
    except (OSError, ValueError) as error:
        names = ", ".join(str(path) for path in paths if path is not None)
        expected = "certificates in PEM, and the certificate's key without a passphrase"
        raise InvalidArgumentError(f"{names}: must hold {expected}: {error}", field="credentials") from None
    return grpc.ssl_channel_credentials(*contents)


class RenewedCredentials:
    """The credentials of files, which may be renewed. Not for several threads at once."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files.

        Raises:
            InvalidArgumentError: They cannot be used.
        """
        self._files, self._state = files, _state(files)
        self._looked_at = time.monotonic()
        self.first = _load(files)

    def renewed(self) -> grpc.ChannelCredentials | None:
        """The credentials of files that have changed. Looks at them if the last look was some time ago."""
        now = time.monotonic()
        if now - self._looked_at < CHECK_SECONDS:
            return None
        self._looked_at = now
        state = _state(self._files)
        if state == self._state:
            return None
        try:
            credentials = _load(self._files)
        except InvalidArgumentError as error:  # perhaps half written: looked at again
            log.warning("renewed certificates are not used: %s", error)
            return None
        if _state(self._files) != state:
            return None
        self._state = state
        return credentials
