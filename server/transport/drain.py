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
import resource
import socket
import stat
import termios
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from attention_serving.server.coroutines import Callback, Task, suspend
from attention_serving.server.engine.errors import ShuttingDownError
from attention_serving.server.transport.call import PATIENCE_SECONDS, Address, Call, Transport

DESCRIPTORS = Path("/proc/self/fd")
INTERNET = (socket.AF_INET, socket.AF_INET6)
UNIX = "unix:"
POLL_SECONDS = 0.01
# How long what was sent may take to reach the peers, once the last call has ended.
FLUSH_SECONDS = 1.0
# How long the statuses of calls that outlast the grace may take to be sent.
LAST_SECONDS = 0.5
OUTLASTED = "the call did not end within the grace of a server that shuts down; retry on another server"


def drain(transport: Transport, grace: float, refuse: Callback) -> None:
    """Ends the calls and connections of a transport, whose thread runs. Returns when they have ended.

    Args:
        transport: The transport.
        grace: Seconds that the calls may take to end.
        refuse: Called first, on the transport's thread. New calls must be refused from then on.
    """
    finished = threading.Event()

    async def end() -> None:
        try:
            await _end_calls(transport, grace, refuse)
        finally:
            finished.set()

    transport.post(Task(end(), transport.post).resume)
    finished.wait(grace + LAST_SECONDS + FLUSH_SECONDS + PATIENCE_SECONDS)


async def _end_calls(transport: Transport, grace: float, refuse: Callback) -> None:
    calls = set(transport.calls)
    refuse()
    stop_listening(transport.addresses)
    left, until = connections(transport.addresses), time.monotonic() + grace
    while (calls := _open(calls)) and time.monotonic() < until:
        left = _without_idle(left, calls)
        await _pause(transport)
    for call in calls:
        call.finish(grpc.StatusCode.UNAVAILABLE, OUTLASTED, reason=ShuttingDownError.reason)
    until = time.monotonic() + (LAST_SECONDS if calls else FLUSH_SECONDS)
    while (calls or left) and time.monotonic() < until:
        left = _without_idle(left, calls)
        await _pause(transport)
        calls = _open(calls)
    for connection in connections(transport.addresses):  # those too that were accepted at the last moment
        connection.close()


def _open(calls: set[Call]) -> set[Call]:
    return {call for call in calls if not call.is_done}


async def _pause(transport: Transport) -> None:
    await suspend(lambda task: transport.call_at(time.monotonic() + POLL_SECONDS, task.resume))


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


def _without_idle(found: list[Connection], calls: set[Call]) -> list[Connection]:
    """Closes the connections that have none of the calls and nothing unsent; returns the others."""
    busy, left = {_peer_address(call.peer) for call in calls}, []
    for connection in found:
        if connection.peer in busy or connection.unsent_bytes:
            left.append(connection)
        else:
            connection.close()
    return left


def listening_address(target: str, port: int) -> Address:
    """The address that a target of gRPC such as `unix:/path` was bound to; `port` if it is not a path."""
    return target.removeprefix(UNIX) if target.startswith(UNIX) else port


def _peer_address(peer: str) -> Address:
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
