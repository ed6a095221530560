"""Deferred replies: their deadlines are kept, and nothing is computed for a call that has ended."""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial

import grpc
import pytest

from attention_serving.server.engine.errors import DeadlineExceededError
from attention_serving.server.engine.types import Result
from attention_serving.server.rpc.calls.deferred import DeferredReply
from attention_serving.server.rpc.calls.ordered_stream import OrderedStream
from attention_serving.server.rpc.calls.route import Route, Send, ordered_stream, server_streaming, unary
from attention_serving.server.rpc.calls.single_request import ServerStream, UnaryCall
from attention_serving.server.rpc.transport.call import Call
from tests.server.rpc.calls.scripted import FREELY, ScriptedCall

CALL_DEADLINE, REPLY_DEADLINE = 100.0, 10.0
WINDOW = 3
RESULT = Result({})


class Handler:
    """Defers the reply to every request, and keeps the futures."""

    def __init__(self, deadline: float = REPLY_DEADLINE) -> None:
        self._deadline = deadline
        self.requests: list[bytes] = []
        self.futures: list[Future[Result]] = []

    def defer(self, request: bytes, call: Call) -> DeferredReply:  # noqa: ARG002 - the signature of a handler
        future: Future[Result] = Future()
        self.requests.append(request)
        self.futures.append(future)
        return DeferredReply(future, partial(_encode, request), self._deadline)

    def send_deferred(self, request: bytes, call: Call, send: Send[DeferredReply]) -> None:
        send(self.defer(request, call))


def _encode(request: bytes, future: Future[Result]) -> bytes:
    try:
        future.result()
    except DeadlineExceededError:
        return request + b" too late"
    return request + b" done"


def write(message: object) -> bytes:
    raise AssertionError(f"{message!r} is serialized already")


def start_unary(call: Call, handler: Handler) -> None:
    UnaryCall(call, unary(bytes, handler.defer, write), FREELY.received)


def start_ordered_stream(call: Call, handler: Handler) -> None:
    OrderedStream(call, ordered_stream(bytes, handler.defer, write), WINDOW, FREELY)


def start_server_stream(call: Call, handler: Handler) -> None:
    ServerStream(call, server_streaming(bytes, handler.send_deferred, write), FREELY.received)


KINDS: dict[str, Callable[[Call, Handler], None]] = {
    "unary": start_unary,
    "ordered stream": start_ordered_stream,
    "server stream": start_server_stream,
}
every_kind = pytest.mark.parametrize("start", KINDS.values(), ids=KINDS)


@every_kind
def test_a_deferred_reply_is_sent_when_its_result_is_there(start: Callable[[Call, Handler], None]) -> None:
    call, handler = ScriptedCall(CALL_DEADLINE), Handler()
    start(call, handler)
    call.deliver(b"a")
    assert call.sent == []
    assert list(call.timers.values()) == [REPLY_DEADLINE]
    handler.futures[0].set_result(RESULT)
    assert call.sent == [b"a done"]
    assert call.timers == {}
    assert call.done_callbacks == {}


@every_kind
def test_the_deadline_of_a_reply_is_kept_within_the_call(start: Callable[[Call, Handler], None]) -> None:
    call, handler = ScriptedCall(CALL_DEADLINE), Handler()
    start(call, handler)
    call.deliver(b"a")
    call.run_timers()
    assert call.sent == [b"a too late"]
    with pytest.raises(DeadlineExceededError):
        handler.futures[0].result(0)


@every_kind
def test_a_reply_without_an_earlier_deadline_needs_no_timer(start: Callable[[Call, Handler], None]) -> None:
    call = ScriptedCall(CALL_DEADLINE)
    start(call, Handler(CALL_DEADLINE))
    call.deliver(b"a")
    assert call.timers == {}


@every_kind
def test_the_end_of_the_call_cancels_its_deferred_replies(start: Callable[[Call, Handler], None]) -> None:
    call, handler = ScriptedCall(CALL_DEADLINE), Handler()
    start(call, handler)
    call.deliver(b"a")
    call.cancel()
    with pytest.raises(CancelledError):
        handler.futures[0].result(0)
    assert (call.sent, call.timers) == ([], {})


@every_kind
@pytest.mark.parametrize("message", [b"a", None], ids=["message", "no message"])
def test_a_message_after_the_end_of_the_call_is_not_handled(
    start: Callable[[Call, Handler], None], message: bytes | None
) -> None:
    call, handler = ScriptedCall(), Handler()
    start(call, handler)
    call.cancel()
    call.deliver(message)
    assert handler.requests == []
    assert not call.is_receiving
    assert call.ended_with is grpc.StatusCode.CANCELLED


def test_a_message_of_a_stream_that_failed_is_not_handled() -> None:
    call, handler = ScriptedCall(), Handler()
    start_ordered_stream(call, handler)
    call.deliver(b"a")
    handler.futures[0].set_exception(ValueError("not a failure of the engine"))
    assert call.ended_with is grpc.StatusCode.INTERNAL
    call.deliver(b"b")
    assert handler.requests == [b"a"]


def test_a_long_stream_keeps_nothing_of_its_earlier_replies() -> None:
    call, handler = ScriptedCall(CALL_DEADLINE), Handler()
    start_ordered_stream(call, handler)
    for number in range(100):
        call.deliver(b"%d" % number)
        handler.futures[number].set_result(RESULT)
        call.complete_send()
    assert len(call.sent) == 100
    assert (call.done_callbacks, call.timers) == ({}, {})


def test_replies_of_a_stream_keep_their_order_and_its_window() -> None:
    call, handler = ScriptedCall(CALL_DEADLINE), Handler()
    start_ordered_stream(call, handler)
    for name in (b"a", b"b", b"c"):
        call.deliver(name)
    assert not call.is_receiving
    for future in reversed(handler.futures):
        future.set_result(RESULT)
    assert call.sent == [b"a done"]
    assert not call.is_receiving
    call.complete_send()
    assert call.sent == [b"a done", b"b done"]
    assert call.is_receiving
    call.deliver(None)
    call.complete_send()
    assert call.ended_with is None
    call.complete_send()
    assert (call.sent, call.ended_with) == ([b"a done", b"b done", b"c done"], grpc.StatusCode.OK)


def test_a_server_stream_sends_one_message_at_a_time() -> None:
    call, sends = ScriptedCall(), list[Send[bytes]]()
    route: Route = server_streaming(bytes, lambda _request, _call, send: sends.append(send), bytes)
    ServerStream(call, route, FREELY.received)
    call.deliver(b"a")
    for message in (b"1", b"2"):
        sends[0](message)
    assert call.sent == [b"1"]
    call.complete_send()
    assert call.sent == [b"1", b"2"]
    call.cancel()
    sends[0](b"3")
    assert call.sent == [b"1", b"2"]
