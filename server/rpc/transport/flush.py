"""Delays the end of calls while a server stops, until what was sent has reached the peers."""

import math
import time
from pathlib import Path

from server.rpc.transport.seam import Callback
from server.rpc.transport.timers import Timers

# The tables of TCP connections that Linux keeps, and the state of an open connection in them.
TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
ESTABLISHED = "01"
POLL_SECONDS = 0.005
MAX_SECONDS = 1.0
# The share of the grace after which no call waits any more: it must still be able to end.
SHARE_OF_GRACE = 0.9


class Flush:
    """Waits for the peers of a server that is stopping.

    The core closes a connection as soon as its last call has ended. If the peer still sends something, such
    as window updates for a large response, the system resets the connection and drops what it has not
    transmitted yet: the end of an accepted call would be lost.

    Attributes:
        port: The port of the server. Connections of other workers on it count as well.
        stopping: Whether the server is stopping.
    """

    def __init__(self, timers: Timers) -> None:
        self.port = 0
        self.stopping = False
        self._timers = timers
        self._waiting: list[Callback] = []
        self._latest = math.inf
        self._until = 0.0

    def begin(self, grace: float) -> None:
        """The server begins to stop, and cancels what is left after `grace` seconds."""
        self._latest = time.monotonic() + SHARE_OF_GRACE * grace
        self.stopping = True

    def then(self, callback: Callback) -> None:
        """Calls back once the peers have acknowledged everything, or after a second."""
        self._until = min(time.monotonic() + MAX_SECONDS, self._latest)
        self._waiting.append(callback)
        if len(self._waiting) == 1:
            self._check()

    def _check(self) -> None:
        now = time.monotonic()
        if now < self._until and unsent_bytes(self.port):
            self._timers.add(now + POLL_SECONDS, self._check)
            return
        callbacks, self._waiting = self._waiting, []
        for callback in callbacks:
            callback()


def unsent_bytes(port: int) -> int:
    """Bytes that the peers of a local port have not acknowledged; 0 if the system does not report them."""
    total = 0
    for table in TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, queues, *_ = line.split()
            if state == ESTABLISHED and int(local.rsplit(":", 1)[1], 16) == port:
                total += int(queues.split(":")[0], 16)
    return total
