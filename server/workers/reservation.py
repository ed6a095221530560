"""One port for several processes: nobody else's, and known before any of them listens."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from server.errors import BindError

# Of a name's addresses, those that this machine has not got are left out, as gRPC does.
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@contextmanager
def reserved(host: str, port: int) -> Iterator[int]:
    """Keeps a port, without listening on it, for those sockets of this user that set SO_REUSEPORT.

    Args:
        host: Name or address.
        port: 0 lets the system choose.

    Yields:
        The port.

    Raises:
        BindError: The address is taken or is none of this machine's.
    """
    with ExitStack() as stack:
        try:
            chosen = _keep(host.strip("[]"), port, stack)
        except OSError as error:
            raise BindError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        yield chosen


def _keep(host: str, port: int, stack: ExitStack) -> int:
    kept, absent = False, OSError(errno.EADDRNOTAVAIL, "no such address")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, (numeric, _, *scope) in found:
        try:
            port = stack.enter_context(_bound(family, (numeric, port, *scope))).getsockname()[1]
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            absent = error
        else:
            kept = True
    if not kept:
        raise absent
    return port


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    # SO_REUSEPORT would join any listener that sets it too, such as another server of this user's: a socket
    # without it finds the port taken.
    _bind(family, address, socket.SO_REUSEADDR).close()
    return _bind(family, address, socket.SO_REUSEADDR, socket.SO_REUSEPORT)


def _bind(family: int, address: tuple[Any, ...], *options: int) -> socket.socket:
    """A socket that listens to nobody."""
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            opened.setsockopt(socket.SOL_SOCKET, option, 1)
        opened.bind(address)
        # It lets calls be bound over connections that are closing. While it is set on both, it would also let
        # another server bind what is reserved here.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        opened.close()
        raise
    return opened
