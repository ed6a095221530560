"""The TCP connections of a server's port, as the operating system sees them.

gRPC's core ends connections only together with its server, and then cancels the calls that arrive at that
moment: their callers see CANCELLED, which is not retried. A connection that the operating system ends shows
UNAVAILABLE to them, and can be ended while others go on. Linux only: elsewhere no connections are found.
"""

import array
import fcntl
import os
import socket
import stat
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

DESCRIPTORS = Path("/proc/self/fd")
INTERNET = (socket.AF_INET, socket.AF_INET6)


class Connection(NamedTuple):
    """One connection.

    Attributes:
        descriptor: Its file descriptor, which the core owns and may close at any time.
        inode: Identifies the socket: the number of a descriptor that was closed is used again.
        peer_port: The port of the other end.
    """

    descriptor: int
    inode: int
    peer_port: int

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


def connections(port: int) -> list[Connection]:
    """The established connections of this process that were made to a local port."""
    found = []
    for descriptor, inode, sock in _sockets(port):
        with suppress(OSError):  # not connected: it listens, or was closed
            found.append(Connection(descriptor, inode, sock.getpeername()[1]))
    return found


def stop_listening(port: int) -> None:
    """Makes the operating system refuse new connections to a local port, or give them to other processes.

    The listening socket is replaced by an unused one, so that its owner neither notices nor closes a
    descriptor of someone else later.
    """
    with socket.socket() as unused:
        for descriptor, _, sock in _sockets(port):
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                os.dup2(unused.fileno(), descriptor, inheritable=False)


def _sockets(port: int) -> Iterator[tuple[int, int, socket.socket]]:
    """The stream sockets of this process with a local port: descriptor, inode and a duplicate."""
    for entry in tuple(DESCRIPTORS.iterdir()) if DESCRIPTORS.exists() else ():
        descriptor = int(entry.name)
        try:
            inode = os.fstat(descriptor).st_ino
        except OSError:  # closed in the meantime
            continue
        with _opened(descriptor, inode) as found:
            if found is not None and _has_port(found, port):
                yield descriptor, inode, found


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


def _has_port(found: socket.socket, port: int) -> bool:
    return found.family in INTERNET and found.type == socket.SOCK_STREAM and found.getsockname()[1] == port
