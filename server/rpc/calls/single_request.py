"""Calls of one request: with one reply, or with a stream of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from attention_serving.server.engine.errors import EngineError
from attention_serving.server.rpc.calls.ending import end_with
from attention_serving.server.rpc.calls.exchange import Exchange
from attention_serving.server.rpc.calls.replies import ReplyQueue
from attention_serving.server.rpc.calls.route import Route
from attention_serving.server.rpc.transport.seam import Call


class SingleRequestCall(ABC):
    """Receives the request. A failure, or a request that is missing, ends this call and no other."""

    def __init__(self, call: Call, route: Route, admit: Callable[[Call], None]) -> None:
        """Begins to receive.

        Args:
            call: The call.
            route: Handles its request.
            admit: Called when the request has arrived; raises OverloadedError if the server does not take it.
        """
        self._call = call
        self._route = route
        self._admit = admit
        call.receive(self._received)

    def _received(self, message: bytes | None) -> None:
        if self._call.ended_with is not None:  # a reply could not be sent
            return
        if message is None:
            self._call.finish(grpc.StatusCode.UNIMPLEMENTED, "the call ended without a request message")
            return
        try:
            self._admit(self._call)
            self._handle(message)
        except Exception as error:
            end_with(self._call, error)

    @abstractmethod
    def _handle(self, message: bytes) -> None:
        """Handles the request."""


class UnaryCall(SingleRequestCall):
    """Replies at once, or once the result is available."""

    def _handle(self, message: bytes) -> None:
        Exchange(self._call, self._route, self._reply).receive(message)

    def _reply(self, exchange: Exchange) -> None:
        # The reservation of the exchange is released when the call has ended.
        try:
            self._call.reply(exchange.content())
        except BaseException as error:
            end_with(self._call, error)


class ServerStream(SingleRequestCall):
    """Sends what its handler sends, in that order, until the call ends."""

    def __init__(self, call: Call, route: Route, admit: Callable[[Call], None]) -> None:
        """See `SingleRequestCall`."""
        self._replies = ReplyQueue(call, route)
        super().__init__(call, route, admit)

    def drain(self, error: EngineError) -> None:
        """Ends with an error once every message that was handed over has been sent."""
        self._replies.close(error)

    def _handle(self, message: bytes) -> None:
        request = self._route.parse(message)
        self._route.handle(request, self._call, partial(_send, self._call, self._replies))


def _send(call: Call, replies: ReplyQueue, message: Any) -> None:
    call.call_soon_threadsafe(partial(replies.put, message))
