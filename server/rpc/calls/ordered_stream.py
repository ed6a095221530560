"""Streams with one reply for each request, in the order of the requests."""

from server.rpc.calls.replies import ReplyQueue
from server.rpc.calls.route import Route
from server.rpc.transport.seam import Call


class OrderedStream(ReplyQueue):
    """Receives requests while the replies to earlier ones are computed and sent.

    A request counts toward the window until its reply has been sent. If the caller reads replies slowly, its
    requests are received slowly.
    """

    def __init__(self, call: Call, route: Route, window: int) -> None:
        """Begins to receive.

        Args:
            call: The stream.
            route: Handles its requests.
            window: Number of requests that may be without a sent reply.
        """
        super().__init__(call, route)
        self._window = window
        self._receiving = self._half_closed = False
        self._receive()

    def _reply_sent(self) -> None:
        self._receive()

    def _receive(self) -> None:
        """Requests the next message, unless the window is full or a request ended the call."""
        ended = self._half_closed or self._failed or self._call.ended_with is not None
        if not (self._receiving or ended) and len(self) < self._window:
            self._receiving = True
            self._call.receive(self._received)

    def _received(self, message: bytes | None) -> None:
        self._receiving = False
        if self._call.ended_with is not None:  # a reply could not be sent
            return
        if message is None:
            self._half_closed = True
            self.close()
            return
        self.receive(message)
        self._receive()
