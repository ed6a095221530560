"""uvicorn's connection, with what it lacks: a limit of connections, of time for heads and for reading, JSON.

Source of the hooks: uvicorn.protocols.http.h11_impl of the pinned release.
"""

import asyncio
import sys
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.http import errors

# The request line and the headers together.
MAX_HEAD_BYTES = 1 << 16
# How long a connection may be without a request.
IDLE_SECONDS = 75
# Where the scope's state has the names in the verified certificate of the client.
PEER_IDENTITIES = "peer_identities"
# Request Header Fields Too Large.
TOO_LARGE = 431


class Connection(H11Protocol):
    """One connection of a client.

    Attributes of the class, set by `connection_type`:
        max_connections: Further connections are closed.
        head_seconds: How long the head of a request may take to arrive. 0 sets no limit.
        send_seconds: How long the client may take to read on. 0 sets no limit.
    """

    max_connections = 0
    head_seconds = 0.0
    send_seconds = 0.0
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to wait for the first request."""
        super().connection_made(cast("asyncio.Transport", transport))
        encryption = transport.get_extra_info("ssl_object")
        if certificate := encryption and encryption.getpeercert(binary_form=True):
            from server.tls import identities  # noqa: PLC0415 - its library is needed with TLS only

            self.app_state = {**self.app_state, PEER_IDENTITIES: identities.of_der(certificate)}
        if len(self.connections) > self.max_connections:
            self.transport.abort()
            return
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clocks."""
        self._stop_head_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handles what has arrived, and watches what has not."""
        super().handle_events()
        self._watch_head()

    def pause_writing(self) -> None:
        """The client does not read: the clock starts."""
        super().pause_writing()
        self._stop_send_timer()
        if self.send_seconds:
            self._send_timer = self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read on."""
        super().resume_writing()
        self._stop_send_timer()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, and a head that is too large. Called where the error is handled."""
        error = sys.exc_info()[1]
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        detail = f"the head is larger than {MAX_HEAD_BYTES} bytes" if hint == TOO_LARGE else str(error or msg)
        self._refuse(hint, f"the request is not valid: {detail}")

    def shutdown(self) -> None:
        """Closes the connection once its request, if it has one, has been answered."""
        if self.conn.our_state is h11.ERROR or self.transport.is_closing():
            return
        super().shutdown()

    def _watch_head(self) -> None:
        """The clock runs while there is neither a request in progress nor an idle connection."""
        in_progress = self.cycle is not None and not self.cycle.response_complete
        if in_progress or self.timeout_keep_alive_task is not None or self.transport.is_closing():
            self._stop_head_timer()
        elif self._head_timer is None and self.head_seconds:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(408, f"the head of the request did not arrive within {self.head_seconds:g} seconds")
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is being sent
            self.transport.abort()
            return
        body = errors.body(message)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


def connection_type(max_connections: int, head_seconds: float, send_seconds: float) -> Any:
    """The class of connections with these limits, as uvicorn takes it."""
    limits = {"max_connections": max_connections, "head_seconds": head_seconds, "send_seconds": send_seconds}
    return type("LimitedConnection", (Connection,), limits)
