"""The file of a Unix domain socket, through which processes of the same machine connect."""

import os
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from attention_serving.server.errors import BindError
from attention_serving.server.tls.files import Certificates, CurrentCertificates

# The operating system's limit for the path of a socket, without the final zero byte.
MAX_PATH_BYTES = 107


class UnixSocket:
    """The file of a socket, from `prepare` over `publish` to `remove`.

    gRPC's core would remove a socket of a running server to bind its own, and remove its path when it stops,
    even if a later server listens there. So it binds a name that nobody else uses, which is then changed.
    """

    def __init__(self, path: Path) -> None:
        """Creates the socket of a path. Nothing is written yet."""
        self.path = path
        self._bound = path.with_name(f"{path.name}.{secrets.token_hex(3)}")
        self._inode = 0

    def prepare(self) -> str:
        """The target to bind, for gRPC. A socket on which nobody listens may be there, and is replaced.

        Raises:
            BindError: The path is too long, its folder does not exist, another process listens on it, or it
                is another kind of file.
        """
        if len(os.fsencode(self._bound)) > MAX_PATH_BYTES:
            most = MAX_PATH_BYTES - len(self._bound.name) + len(self.path.name)
            raise BindError(f"cannot listen on {self.path}: the path is longer than {most} bytes")
        if not self.path.parent.is_dir():
            raise BindError(f"cannot listen on {self.path}: the folder does not exist")
        if self.path.exists() and not self.path.is_socket():
            raise BindError(f"cannot listen on {self.path}: there is a file that is not a socket")
        if _is_listened_on(self.path):
            raise BindError(f"cannot listen on {self.path}: another process listens on it")
        return f"unix:{self._bound}"

    def publish(self) -> None:
        """Gives the bound socket its name.

        Raises:
            BindError: The file cannot be renamed.
        """
        try:
            self._inode = self._bound.stat().st_ino
            self._bound.rename(self.path)
        except OSError as error:
            raise BindError(f"cannot listen on {self.path}: {error.strerror}") from error

    def remove(self) -> None:
        """Removes the file unless it belongs to a later server. Does nothing before `publish`."""
        with suppress(OSError):
            found = self.path.stat()
            if self._inode == found.st_ino and stat.S_ISSOCK(found.st_mode):
                self.path.unlink()


def _is_listened_on(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def tls_credentials(current: CurrentCertificates) -> grpc.ServerCredentials:
    """Credentials of one listening address, whose handshakes use the certificates of that moment.

    Whether clients need a certificate is decided once, because it does not change.
    """
    used = current()

    def renewed() -> Any:
        """None if nothing has changed. The core calls this before each handshake, on threads of its own."""
        nonlocal used
        latest = current()
        if latest is used:
            return None
        used = latest
        return _configuration(latest)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), renewed, require_client_authentication=used.client_ca is not None
    )


def private_credentials() -> grpc.ServerCredentials:
    """Credentials of a Unix domain socket that only processes of the same user can connect to."""
    return grpc.local_server_credentials(grpc.LocalConnectionType.UDS)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = certificates.contents.key, certificates.contents.certificate
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca)
