"""Reserves one port for several processes before any of them listens on it."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from attention_serving.server.errors import BindError

# A name's addresses that this machine does not have are skipped, as gRPC does.
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@contextmanager
def reserved(host: str, port: int) -> Iterator[int]:
    """Binds a port without listening on it; only this user's sockets with SO_REUSEPORT can then bind it.

    Args:
        host: Address or host name.
        port: 0 selects a free port.

    Yields:
        The port.

    Raises:
        BindError: The address is in use, or does not belong to this machine.
    """
    with ExitStack() as stack:
        try:
            bound = _bind_all(host.strip("[]"), port, stack)
        except OSError as error:
            raise BindError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        yield bound


def _bind_all(host: str, port: int, stack: ExitStack) -> int:
    """Binds every address of a host that this machine has; returns the port."""
    bound, absent = False, OSError(errno.EADDRNOTAVAIL, "no such address")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, (numeric, _, *scope) in found:
        try:
            port = stack.enter_context(_bind_exclusively(family, (numeric, port, *scope))).getsockname()[1]
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            absent = error
        else:
            bound = True
    if not bound:
        raise absent
    return port


def _bind_exclusively(family: int, address: tuple[Any, ...]) -> socket.socket:
    # A socket with SO_REUSEPORT would also join other listeners that set it, such as another server of the
    # same user. A socket without it, bound first, fails if the port is in use.
    _bind(family, address, socket.SO_REUSEADDR).close()
    return _bind(family, address, socket.SO_REUSEADDR, socket.SO_REUSEPORT)


def _bind(family: int, address: tuple[Any, ...], *options: int) -> socket.socket:
    """A bound socket that does not listen."""
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            opened.setsockopt(socket.SOL_SOCKET, option, 1)
        opened.bind(address)
        # SO_REUSEADDR is needed to bind while old connections of the port are in TIME_WAIT. If it stayed set,
        # another server with SO_REUSEADDR could bind the reserved port.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        opened.close()
        raise
    return opened
