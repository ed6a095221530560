"""Calls with many answers: one for each request, in their order; or as news comes."""

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

import grpc

from server.rpc.calls import Later, Method, end_with, receive_one
from server.rpc.completion_queue import Call


class OrderedStream:
    """Answers the requests of one call in their order, while it reads the next.

    A request counts against the window until its answer was sent, so that a caller who reads slowly is
    read from slowly.
    """

    def __init__(self, call: Call, method: Method, window: int) -> None:
        self._call = call
        self._method = method
        self._window = window
        self._lock = threading.Lock()
        self._pending: deque[Any] = deque()
        self._sending = self._receiving = self._half_closed = False
        call.add_callback(self._give_up)
        self._advance()

    def _received(self, message: bytes | None) -> None:
        answer = None
        try:
            if message is not None:
                answer = self._method.ask(message, self._call)
        except Exception as error:
            end_with(self._call, error)
            return
        with self._lock:
            self._receiving = False
            self._half_closed = message is None
            if message is not None:
                self._pending.append(answer)
        if isinstance(answer, Later):
            answer.future.add_done_callback(self._resolved)
        self._advance()

    def _sent(self, success: bool) -> None:  # noqa: FBT001 - what the core says
        with self._lock:
            self._sending = False
        if success:
            self._advance()

    def _resolved(self, _future: Future[Any]) -> None:
        self._call.soon(self._advance)

    def _advance(self) -> None:
        """Sends the next answer, receives the next request and ends the call, each where it may."""
        with self._lock:
            held = len(self._pending) + self._sending
            receive = not self._receiving and not self._half_closed and held < self._window
            self._receiving |= receive
            answer = self._pending.popleft() if not self._sending and self._is_next_there() else None
            self._sending |= answer is not None
            more = self._is_next_there()
            end = self._half_closed and not self._pending and not self._sending
        if receive:
            self._call.receive(self._received)
        if answer is not None:
            self._send(answer, more=more)
        if end:
            self._call.finish(grpc.StatusCode.OK)

    def _is_next_there(self) -> bool:
        if not self._pending:
            return False
        answer = self._pending[0]
        return answer.future.done() if isinstance(answer, Later) else True

    def _send(self, answer: Any, *, more: bool) -> None:
        try:
            message = answer.encode(answer.future) if isinstance(answer, Later) else answer
            self._call.send(self._method.write(message), self._sent, more=more)
        except BaseException as error:
            end_with(self._call, error)

    def _give_up(self) -> None:
        """The call has ended: what is still on its way is not wanted any more."""
        with self._lock:
            pending = list(self._pending)
        for answer in pending:
            if isinstance(answer, Later):
                answer.future.cancel()


class News:
    """Sends the messages that a service of a library calls back with, one after the other."""

    def __init__(self, call: Call, method: Method) -> None:
        self._call = call
        self._method = method
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._sending = False
        receive_one(call, self._received)

    def _received(self, message: bytes) -> None:
        self._method.behavior(self._method.read(message), self._call, self._put)

    def _put(self, message: Any) -> None:
        """Sends a message; None once the call has ended."""
        if message is None:
            return
        with self._lock:
            self._waiting.append(self._method.write(message))
        self._advance()

    def _sent(self, success: bool) -> None:  # noqa: FBT001 - what the core says
        with self._lock:
            self._sending = False
        if success:
            self._advance()

    def _advance(self) -> None:
        with self._lock:
            if self._sending or not self._waiting:
                return
            self._sending = True
            message = self._waiting.popleft()
        self._call.send(message, self._sent)
