"""The connections of a server's addresses, as the operating system sees them.

This is the only file that touches the sockets of gRPC's core, because the core alone cannot keep what a drain
promises: that callers see an answer or UNAVAILABLE, and that each connection ends as soon as it is idle. It
has no call that stops listening or ends one connection. It does both only for all connections together with
its server, and then cancels the calls that arrive at that moment: with grpcio 1.85, about ten calls of three
busy clients end with CANCELLED, which clients do not retry. A connection that the operating system ends shows
UNAVAILABLE to them, and can be ended while others go on.

Nor does it tell how many connections there are, except through an internal API. To count them, every
descriptor of the process is looked at, 20 microseconds each.

Linux only: elsewhere no connections are found.
"""

import array
import fcntl
import math
import os
import resource
import socket
import stat
import termios
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

DESCRIPTORS = Path("/proc/self/fd")
INTERNET = (socket.AF_INET, socket.AF_INET6)
UNIX = "unix:"
# How old a number of connections may be before they are counted again.
COUNT_SECONDS = 10.0
Address: TypeAlias = int | str
"""One end of a connection: a TCP port, or the path of a Unix domain socket, which is empty for a client."""


class Connection(NamedTuple):
    """One connection.

    Attributes:
        descriptor: Its file descriptor, which the core owns and may close at any time.
        inode: Identifies the socket: the number of a descriptor that was closed is used again.
        peer: The other end.
    """

    descriptor: int
    inode: int
    peer: Address

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the peer has not acknowledged; 0 if the connection is closed."""
        queued = array.array("i", [0])
        with _opened(self.descriptor, self.inode) as found:
            if found is not None:
                fcntl.ioctl(found, termios.TIOCOUTQ, queued)
        return queued[0]

    def close(self) -> None:
        """Ends the connection in both directions. Does nothing if it is closed."""
        with _opened(self.descriptor, self.inode) as found, suppress(OSError):
            if found is not None:
                found.shutdown(socket.SHUT_RDWR)


def listening_address(target: str, port: int) -> Address:
    """The address that a target of gRPC such as `unix:/path` was bound to; `port` if it is not a path."""
    return target.removeprefix(UNIX) if target.startswith(UNIX) else port


def peer_address(peer: str) -> Address:
    """The address of a call's peer, which gRPC calls `ipv4:127.0.0.1:50000` or `unix:`; -1 if unknown."""
    if peer.startswith(UNIX):
        return peer.removeprefix(UNIX)
    port = peer.rsplit(":", 1)[-1]
    return int(port) if port.isdecimal() else -1


def connections(addresses: Collection[Address]) -> list[Connection]:
    """The established connections of this process that were made to local addresses."""
    found = []
    for descriptor, inode, sock in _sockets(addresses):
        with suppress(OSError):  # not connected: it listens, or was closed
            found.append(Connection(descriptor, inode, _address(sock.getpeername())))
    return found


class ConnectionCount:
    """The number of connections, which costs little to ask for often."""

    def __init__(self, addresses: Collection[Address]) -> None:
        """Counts nothing yet.

        Args:
            addresses: Where the server listens. May change.
        """
        self._addresses = addresses
        self._count = 0
        self._counted_at = -math.inf

    def recent(self) -> int:
        """The number of connections now, or at most `COUNT_SECONDS` ago. For any thread."""
        now = time.monotonic()
        if now - self._counted_at >= COUNT_SECONDS:
            self._counted_at = now
            self._count = len(connections(self._addresses))
        return self._count


def stop_listening(addresses: Collection[Address]) -> None:
    """Makes the operating system refuse new connections to local addresses, or give them to other processes.

    The listening socket is replaced by an unused one, so that its owner neither notices nor closes a
    descriptor of someone else later.
    """
    with socket.socket() as unused:
        for descriptor, _, sock in _sockets(addresses):
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                os.dup2(unused.fileno(), descriptor, inheritable=False)


def _sockets(addresses: Collection[Address]) -> Iterator[tuple[int, int, socket.socket]]:
    """The stream sockets of this process with a local address: descriptor, inode and the socket itself.

    The descriptors belong to others, who may close them at any time: the sockets may only be looked at.
    """
    for descriptor in _descriptors():
        with suppress(OSError):  # closed in the meantime
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            found = socket.socket(fileno=descriptor)
            try:
                if _has_address(found, addresses):
                    yield descriptor, status.st_ino, found
            finally:
                found.detach()


def _descriptors() -> Iterable[int]:
    """The descriptors of this process, some of which may be closed."""
    try:
        return [int(entry.name) for entry in DESCRIPTORS.iterdir()]
    except FileNotFoundError:
        return ()
    except OSError:  # to list them takes one, and none is free
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


@contextmanager
def _opened(descriptor: int, inode: int) -> Iterator[socket.socket | None]:
    """A duplicate of a socket, which stays that socket whatever happens to the descriptor; None if gone."""
    try:
        duplicate = os.dup(descriptor)
    except OSError:  # closed in the meantime
        yield None
        return
    status = os.fstat(duplicate)
    if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):
        os.close(duplicate)
        yield None
        return
    with socket.socket(fileno=duplicate) as found:
        yield found


def _has_address(found: socket.socket, addresses: Collection[Address]) -> bool:
    if found.type != socket.SOCK_STREAM or found.family not in {*INTERNET, socket.AF_UNIX}:
        return False
    return _address(found.getsockname()) in addresses


def _address(name: Any) -> Address:
    """The address in what the operating system returns: a path, or host, port and more."""
    if isinstance(name, tuple):
        return int(name[1])
    return os.fsdecode(name)
