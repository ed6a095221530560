"""Streams with one reply for each request, in the order of the requests."""

from typing import Protocol

from attention_serving.server.engine.errors import EngineError
from attention_serving.server.rpc.calls.ending import end_with
from attention_serving.server.rpc.calls.replies import ReplyQueue
from attention_serving.server.rpc.calls.route import Route
from attention_serving.server.rpc.transport.seam import Call


class StreamProgress(Protocol):
    """Follows what the streams of a server do."""

    def received(self, call: Call) -> None:
        """A request of a stream arrived.

        Raises:
            OverloadedError: The server does not take it.
        """

    def idle(self, call: Call) -> None:
        """Every reply of a stream has been sent: it waits for a request."""


class OrderedStream(ReplyQueue):
    """Receives requests while the replies to earlier ones are computed and sent.

    A request counts toward the window until its reply has been sent. If the caller reads replies slowly, its
    requests are received slowly.
    """

    def __init__(self, call: Call, route: Route, window: int, progress: "StreamProgress") -> None:
        """Begins to receive.

        Args:
            call: The stream.
            route: Handles its requests.
            window: Number of requests that may be without a sent reply.
            progress: Is told of each request and reply; may refuse a request.
        """
        super().__init__(call, route)
        self._window = window
        self._progress = progress
        self._receiving = self._half_closed = False
        self._receive()

    def drain(self, error: EngineError) -> None:
        """Receives no more, and ends with an error once the replies to what was received have been sent."""
        self._half_closed = True
        self.close(error)

    def _reply_sent(self) -> None:
        if not len(self):
            self._progress.idle(self._call)
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
        if self._half_closed:  # it arrived after the drain began
            return
        try:
            self._progress.received(self._call)
        except EngineError as error:
            end_with(self._call, error)
            return
        self.receive(message)
        self._receive()
