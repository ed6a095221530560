"""A call of one request and one answer."""

from concurrent.futures import Future
from functools import partial

from server.engine.types import Result
from server.rpc.calls import Encode, Later, Method, end_with, expire, receive_one
from server.rpc.completion_queue import Call


class UnaryCall:
    """Receives the request, asks the service and replies, at once or when the result is there."""

    def __init__(self, call: Call, method: Method) -> None:
        self._call = call
        self._method = method
        receive_one(call, self._received)

    def _received(self, message: bytes) -> None:
        answer = self._method.ask(message, self._call)
        if isinstance(answer, Later):
            self._wait(answer)
        else:
            self._call.reply(self._method.write(answer))

    def _wait(self, later: Later) -> None:
        future = later.future
        if later.until < self._call.deadline:
            self._call.at(later.until, lambda: expire(future))
        self._call.add_callback(future.cancel)
        # A future keeps its callbacks: one that held the future would make garbage for the collector.
        future.add_done_callback(partial(self._resolved, later.encode))

    def _resolved(self, encode: Encode, future: Future[Result]) -> None:
        self._call.soon(partial(self._reply, encode, future))

    def _reply(self, encode: Encode, future: Future[Result]) -> None:
        try:
            self._call.reply(self._method.write(encode(future)))
        except BaseException as error:
            end_with(self._call, error)
