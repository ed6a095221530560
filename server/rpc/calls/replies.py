"""Sends the replies of a stream one after the other."""

from collections import deque
from typing import Any

import grpc

from attention_serving.server.engine.errors import EngineError
from attention_serving.server.rpc.calls.ending import end_with
from attention_serving.server.rpc.calls.exchange import Exchange
from attention_serving.server.rpc.calls.route import Route
from attention_serving.server.rpc.transport.seam import Call


class ReplyQueue:
    """Replies of one call. A deferred reply delays those behind it until it is complete."""

    def __init__(self, call: Call, route: Route) -> None:
        self._call = call
        self._route = route
        self._replies: deque[Exchange] = deque()
        self._sending: Exchange | None = None
        self._closed = self._failed = False
        self._error: EngineError | None = None

    def __len__(self) -> int:
        """Number of replies that have not been sent, including one that is being sent."""
        return len(self._replies) + (self._sending is not None)

    def put(self, reply: Any) -> None:
        """Adds a reply: a message, its serialized form, or one that comes later."""
        self._add().answer(reply)

    def receive(self, message: bytes) -> None:
        """Adds the reply to a request, which the route handles. An error takes the place of the reply."""
        self._add().receive(message)

    def _add(self) -> Exchange:
        exchange = Exchange(self._call, self._route, self._completed)
        self._replies.append(exchange)
        return exchange

    def close(self, error: EngineError | None = None) -> None:
        """Ends the call once every reply has been sent. Only the first call counts.

        Args:
            error: What the call ends with. None ends it with OK.
        """
        if not self._closed:
            self._closed, self._error = True, error
            self._advance()

    def _completed(self, exchange: Exchange) -> None:
        self._failed = self._failed or exchange.failed
        self._advance()

    def _sent(self, success: bool) -> None:  # noqa: FBT001 - as the transport calls it
        sent, self._sending = self._sending, None
        if sent is not None:
            sent.release()
        if success:
            self._advance()
            self._reply_sent()

    def _reply_sent(self) -> None:
        """Called each time that a reply has been sent."""

    def _advance(self) -> None:
        """Sends the next reply if it is complete, or ends the call after the last."""
        if self._sending is not None or self._call.ended_with is not None:
            return
        if self._is_next_complete():
            self._sending = self._replies.popleft()
            self._send(self._sending)
        elif self._closed and not self._replies:
            self._end()

    def _end(self) -> None:
        if self._error is not None:
            end_with(self._call, self._error)
        else:
            self._call.finish(grpc.StatusCode.OK)

    def _is_next_complete(self) -> bool:
        return bool(self._replies) and self._replies[0].done

    def _send(self, exchange: Exchange) -> None:
        try:
            self._call.send(exchange.content(), self._sent, more=self._is_next_complete())
        except BaseException as error:
            end_with(self._call, error)
