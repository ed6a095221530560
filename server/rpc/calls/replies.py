"""Sends the replies of a stream one after the other."""

from collections import deque
from concurrent.futures import Future
from typing import Any

import grpc

from server.engine.errors import EngineError
from server.rpc.calls.deferred import DeferredReply, wait
from server.rpc.calls.ending import end_with
from server.rpc.calls.route import Route
from server.rpc.transport.seam import Call


class ReplyQueue:
    """Replies of one call. A deferred reply delays those behind it until it is complete."""

    def __init__(self, call: Call, route: Route) -> None:
        self._call = call
        self._route = route
        self._replies: deque[Any] = deque()
        self._sending = self._closed = False
        self._error: EngineError | None = None

    def __len__(self) -> int:
        """Number of replies that have not been sent, including one that is being sent."""
        return len(self._replies) + self._sending

    def put(self, reply: Any) -> None:
        """Adds a reply."""
        self._replies.append(reply)
        if isinstance(reply, DeferredReply):
            wait(self._call, reply, self._resolved)
        self._advance()

    def close(self, error: EngineError | None = None) -> None:
        """Ends the call once every reply has been sent. Only the first call counts.

        Args:
            error: What the call ends with. None ends it with OK.
        """
        if not self._closed:
            self._closed, self._error = True, error
            self._advance()

    def _resolved(self, _future: Future[Any]) -> None:
        self._advance()

    def _sent(self, success: bool) -> None:  # noqa: FBT001 - as the transport calls it
        self._sending = False
        if success:
            self._advance()
            self._reply_sent()

    def _reply_sent(self) -> None:
        """Called each time that a reply has been sent."""

    def _advance(self) -> None:
        """Sends the next reply if it is complete, or ends the call after the last."""
        if self._sending or self._call.ended_with is not None:
            return
        if self._is_next_complete():
            self._sending = True
            self._send(self._replies.popleft())
        elif self._closed and not self._replies:
            self._end()

    def _end(self) -> None:
        if self._error is not None:
            end_with(self._call, self._error)
        else:
            self._call.finish(grpc.StatusCode.OK)

    def _is_next_complete(self) -> bool:
        if not self._replies:
            return False
        reply = self._replies[0]
        return not isinstance(reply, DeferredReply) or reply.future.done()

    def _send(self, reply: Any) -> None:
        try:
            content = reply.encode(reply.future) if isinstance(reply, DeferredReply) else reply
            self._call.send(self._route.serialize(content), self._sent, more=self._is_next_complete())
        except BaseException as error:
            end_with(self._call, error)
