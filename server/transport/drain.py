"""How a transport stops: it ends the calls that are open, and then its connections, one by one.

gRPC's core is stopped last, when no connection is left that could bring it a call: `connections` says why.
"""

import threading
import time
from collections.abc import Callable, Collection
from typing import TypeAlias

import grpc

from attention_serving.server.engine.errors import ShuttingDownError
from attention_serving.server.transport.call import Call, OpenCalls
from attention_serving.server.transport.connections import (
    Address,
    connections,
    peer_address,
    stop_listening,
)

# Runs a callback of the transport's thread at a moment.
CallAt: TypeAlias = Callable[[float, Callable[[], object]], object]
POLL_SECONDS = 0.01
# How long what was sent may take to reach the peers, once the last call has ended.
FLUSH_SECONDS = 1.0
# How long the statuses of calls that outlast the grace may take to be sent.
LAST_SECONDS = 0.5
OUTLASTED = "the call did not end within the grace of a server that shuts down; retry on another server"


class Drain:
    """Ends the calls and connections of a server's addresses.

    1. The operating system refuses new connections.
    2. The calls that are open at this moment may end. Those that are left after the grace end with
       UNAVAILABLE. Later calls do not delay the drain: the transport refuses them.
    3. A connection is closed as soon as none of these calls is on it and its peer has received everything.
       Its client connects to another server at once, or sees UNAVAILABLE. Connections through a Unix domain
       socket cannot be told apart, so they are closed together.
    """

    def __init__(
        self,
        addresses: Collection[Address],
        calls: OpenCalls,
        call_at: Callable[[float, Callable[[], object]], object],
        grace: float,
    ) -> None:
        """Creates a drain that has not begun.

        Args:
            addresses: Where the server listens.
            calls: The open calls.
            call_at: Runs a callback of the transport's thread at a moment.
            grace: Seconds that the calls may take to end.
        """
        self.finished = threading.Event()
        self._addresses = addresses
        self._calls = calls
        self._call_at = call_at
        self._grace = grace

    @property
    def longest_seconds(self) -> float:
        """How long a drain takes at most, once it has begun."""
        return self._grace + LAST_SECONDS + FLUSH_SECONDS

    def begin(self, refuse: Callable[[], object]) -> None:
        """Begins. On the transport's thread.

        Args:
            refuse: Called first. New calls must be refused from then on.
        """
        self._left: set[Call] = set(self._calls)
        refuse()
        stop_listening(self._addresses)
        self._connections = connections(self._addresses)
        self._latest = time.monotonic() + self._grace
        self._poll()

    def _poll(self) -> None:
        now = time.monotonic()
        self._left = {call for call in self._left if not call.is_done}
        if not self._left:
            self._flush(now + FLUSH_SECONDS)
        elif now < self._latest:
            self._close_idle()
            self._call_at(now + POLL_SECONDS, self._poll)
        else:
            self._end_calls()
            self._flush(now + LAST_SECONDS)

    def _end_calls(self) -> None:
        for call in self._left:
            call.finish(grpc.StatusCode.UNAVAILABLE, OUTLASTED, reason=ShuttingDownError.reason)

    def _close_idle(self) -> None:
        """Closes the connections that have none of the calls and nothing unsent."""
        busy = {peer_address(call.peer) for call in self._left}
        for connection in tuple(self._connections):
            if connection.peer not in busy and not connection.unsent_bytes:
                connection.close()
                self._connections.remove(connection)

    def _flush(self, until: float) -> None:
        """Closes every connection once its peer has received everything, or at that moment."""
        self._left = {call for call in self._left if not call.is_done}
        now = time.monotonic()
        if now < until:
            self._close_idle()
            if self._left or self._connections:
                self._call_at(now + POLL_SECONDS, lambda: self._flush(until))
                return
        for connection in connections(self._addresses):  # those too that were accepted at the last moment
            connection.close()
        self.finished.set()
