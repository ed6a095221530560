"""A call of one request and one answer."""

from server.rpc.calls import Later, Method, end_with, expire
from server.rpc.completion_queue import Call


class UnaryCall:
    """Receives the request, asks the service and replies, at once or when the result is there."""

    def __init__(self, call: Call, method: Method) -> None:
        self._call = call
        self._method = method
        call.receive(self._received)

    def _received(self, message: bytes | None) -> None:
        if message is None:  # the caller left, or the core refused its message
            return
        try:
            answer = self._method.ask(message, self._call)
            if isinstance(answer, Later):
                self._wait(answer)
            else:
                self._call.reply(self._method.write(answer))
        except Exception as error:
            end_with(self._call, error)

    def _wait(self, later: Later) -> None:
        if later.until < self._call.deadline:
            self._call.at(later.until, lambda: expire(later.future))
        if not later.future.done():
            self._call.add_callback(later.future.cancel)
        later.future.add_done_callback(lambda _: self._reply(later))

    def _reply(self, later: Later) -> None:
        try:
            self._call.reply(self._method.write(later.encode(later.future)))
        except BaseException as error:
            end_with(self._call, error)
