"""How a transport stops: it ends the calls that are open, and then its connections, one by one.

1. The operating system refuses new connections.
2. The calls that are open at this moment may end. Those that are left after the grace end with UNAVAILABLE.
   Later calls do not delay the drain: they are refused.
3. A connection is closed as soon as none of these calls is on it and its peer has received everything. Its
   client connects to another server at once, or sees UNAVAILABLE. Connections through a Unix domain socket
   cannot be told apart, so they are closed together.
4. gRPC's core is stopped last, when no connection is left that could bring it a call.

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
import os
import socket
import stat
import termios
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc

from attention_serving.server.coroutines import Callback
from attention_serving.server.engine.errors import ShuttingDownError
from attention_serving.server.transport.call import CORE_TIMEOUT_SECONDS, Address, Call, Transport

DESCRIPTORS = Path("/proc/self/fd")
FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
UNIX = "unix:"
POLL_SECONDS = 0.01
# How long what was sent may take to reach the peers, once the last call has ended.
FLUSH_SECONDS = 1.0
# How long the statuses of calls that outlast the grace may take to be sent.
CANCEL_TIMEOUT_SECONDS = 0.5
GRACE_EXPIRED = "the call did not end within the grace of a server that shuts down; retry on another server"


def drain(transport: Transport, grace: float, refuse: Callback) -> None:
    """Ends the calls and connections of a transport, whose thread runs. Returns when they have ended.

    Args:
        transport: The transport.
        grace: Seconds that the calls may take to end.
        refuse: Called first, on the transport's thread. New calls must be refused from then on.
    """
    calls, refused = set[Call](), threading.Event()

    def begin() -> None:
        calls.update(transport.calls)
        refuse()
        refused.set()

    transport.post(begin)
    refused.wait(CORE_TIMEOUT_SECONDS)
    stop_listening(transport.addresses)
    open_connections = connections(transport.addresses)
    until = time.monotonic() + grace
    while _are_open(calls) and time.monotonic() < until:
        _close_idle(open_connections, calls)
        time.sleep(POLL_SECONDS)
    for call in calls:
        code, reason = grpc.StatusCode.UNAVAILABLE, ShuttingDownError.reason
        transport.post(partial(call.finish, code, GRACE_EXPIRED, reason=reason))
    until = time.monotonic() + (CANCEL_TIMEOUT_SECONDS if calls else FLUSH_SECONDS)
    while (_are_open(calls) or open_connections) and time.monotonic() < until:
        _close_idle(open_connections, calls)
        time.sleep(POLL_SECONDS)
    # Those too that were accepted at the last moment.
    for connection in [*open_connections, *connections(transport.addresses)]:
        connection.close()


def _are_open(calls: set[Call]) -> bool:
    """Whether any of the calls is; the others are left out from now on."""
    calls -= {call for call in calls if call.is_done}
    return bool(calls)


def _close_idle(connections: list["Connection"], calls: set[Call]) -> None:
    """Closes the connections that have none of the calls and nothing unsent, and leaves them out."""
    busy = {_peer_address(call.peer) for call in calls}
    for connection in tuple(connections):
        if connection.peer not in busy and not connection.unsent_bytes:
            connection.close()
            connections.remove(connection)


class Connection(NamedTuple):
    """One connection.

    Attributes:
        duplicate: A duplicate of its socket, which stays that socket when the core closes its own.
        peer: The other end.
    """

    duplicate: socket.socket
    peer: Address

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the peer has not acknowledged; 0 if the connection is closed."""
        queued = array.array("i", [0])
        fcntl.ioctl(self.duplicate, termios.TIOCOUTQ, queued)
        return queued[0]

    def close(self) -> None:
        """Ends the connection in both directions."""
        with suppress(OSError), self.duplicate:  # it may have ended
            self.duplicate.shutdown(socket.SHUT_RDWR)


def listening_address(target: str, port: int) -> Address:
    """The address that a target of gRPC such as `unix:/a%20path` was bound to; `port` if it is not a path."""
    return unquote(target.removeprefix(UNIX)) if target.startswith(UNIX) else port


def _peer_address(peer: str) -> Address:
    """The address of a call's peer, which gRPC calls `ipv4:127.0.0.1:50000` or `unix:`; -1 if unknown."""
    if peer.startswith(UNIX):
        return peer.removeprefix(UNIX)
    port = peer.rsplit(":", 1)[-1]
    return int(port) if port.isdecimal() else -1


def connections(addresses: Collection[Address]) -> list[Connection]:
    """The established connections of this process that were made to local addresses."""
    established = []
    for duplicate in _sockets(addresses):
        try:
            established.append(Connection(duplicate, _address(duplicate.getpeername())))
        except OSError:  # not connected: it listens, or was closed
            duplicate.close()
    return established


def count_connections(addresses: Collection[Address]) -> int:
    """How many there are."""
    established = connections(addresses)
    for connection in established:
        connection.duplicate.close()
    return len(established)


def stop_listening(addresses: Collection[Address]) -> None:
    """Makes the operating system refuse new connections to local addresses, or give them to other processes.

    The core, which owns the listening socket, accepts nothing from it any more.
    """
    for duplicate in _sockets(addresses):
        with duplicate:
            if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                duplicate.shutdown(socket.SHUT_RDWR)


def _sockets(addresses: Collection[Address]) -> Iterator[socket.socket]:
    """Duplicates of the stream sockets of this process with a local address.

    The descriptors belong to others, who may close them at any time, so that their numbers may be reused.
    """
    try:
        descriptors = [int(entry.name) for entry in DESCRIPTORS.iterdir()]
    except OSError:  # not Linux, or no descriptor is free
        return
    inodes = set[int]()
    for descriptor in descriptors:
        with suppress(OSError):  # closed in the meantime
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino in inodes:  # it may be a duplicate
                continue
            inodes.add(status.st_ino)
            duplicate = socket.socket(fileno=os.dup(descriptor))
            is_stream = duplicate.type == socket.SOCK_STREAM and duplicate.family in FAMILIES
            if is_stream and _address(duplicate.getsockname()) in addresses:
                yield duplicate
            else:
                duplicate.close()


def _address(name: Any) -> Address:
    """The address in what the operating system returns: a path, or host, port and more."""
    if isinstance(name, tuple):
        return int(name[1])
    return os.fsdecode(name)
