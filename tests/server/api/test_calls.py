"""Calls whose results come later: order, windows and deadlines; nothing is done for a call that has ended."""

import gc
import math
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import ClassVar, get_args

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_serving.server.api.method import CallKind, Method
from attention_serving.server.coroutines import result_of
from attention_serving.server.engine.budget import ANYONE
from attention_serving.server.engine.errors import OverloadedError
from attention_serving.server.transport.call import Call
from tests.server.api.scripted import ScriptedCall, calls_of, started
from tests.server.seams import Calls as Observed
from tests.server.seams import settings_of

LIMITS = settings_of(message_timeout_seconds=60, stream_idle_seconds=60, stream_window=3)


class Handler:
    """Awaits a future for each request, and keeps the futures."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.futures: list[Future[bytes]] = []
        self.ended: list[bytes] = []

    def begin(self, message: bytes) -> "Future[bytes]":
        future: Future[bytes] = Future()
        self.requests.append(message)
        self.futures.append(future)
        return future

    async def answer(self, message: bytes, _call: Call, _reservation: None) -> bytes:
        try:
            reply: bytes = await result_of(self.begin(message))
            return message + reply
        finally:
            self.ended.append(message)

    async def watch(self, message: bytes) -> AsyncIterator[bytes]:
        try:
            reply: bytes = await result_of(self.begin(message))
            yield message + reply
            await result_of(Future[bytes]())
        finally:
            self.ended.append(message)


def method_of(handler: Handler, kind: CallKind = "unary") -> Method:
    handle = handler.watch if kind == "server stream" else handler.answer
    return Method(kind=kind, handle=handle, right=None)


every_kind = pytest.mark.parametrize("kind", get_args(CallKind))


def leaves(call: ScriptedCall, handler: Handler) -> None:
    call.deliver(b"a")
    assert handler.ended == []
    call.cancel()
    assert (call.sent, handler.ended) == ([], [b"a"])


def is_answered(call: ScriptedCall, handler: Handler) -> None:
    call.deliver(b"a")
    assert call.sent == []
    handler.futures[0].set_result(b" done")
    assert call.sent == [b"a done"]
    if call.has_sends:
        call.complete_send()
    if call.is_receiving:
        call.deliver(None)
    call.finish(grpc.StatusCode.OK)  # of a server stream, which would go on
    call.complete()


def has_no_request(call: ScriptedCall, handler: Handler) -> None:
    call.deliver(None)
    assert call.status_code in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED)
    call.complete()
    assert handler.requests == []


@every_kind
@pytest.mark.parametrize("end", [leaves, is_answered, has_no_request])
def test_a_call_that_has_ended_is_freed_by_reference_counting(
    kind: CallKind, end: Callable[[ScriptedCall, Handler], None]
) -> None:
    """With it goes what it waits for, and what the core keeps, such as a reply that was not taken."""
    handler = Handler()
    call = started(method_of(handler, kind), LIMITS)
    freed = weakref.ref(call)
    gc.disable()
    try:
        end(call, handler)
        assert all(future.done() for future in handler.futures)
        handler.futures.clear()
        del call
        assert freed() is None
    finally:
        gc.enable()


@every_kind
def test_a_message_after_the_end_of_the_call_is_not_handled(kind: CallKind) -> None:
    handler = Handler()
    call = started(method_of(handler, kind))
    call.cancel()
    call.deliver(b"a")
    assert (handler.requests, call.is_receiving) == ([], False)
    assert call.status_code is grpc.StatusCode.CANCELLED


class Message(bytes):
    """A message with the names of those that are in memory."""

    alive: ClassVar[set[bytes]] = set()

    def __del__(self) -> None:
        self.alive.discard(bytes(self))


@given(steps=st.lists(st.integers(0, 9), max_size=40))
def test_of_the_messages_of_a_stream_only_those_that_are_handled_are_in_memory(steps: list[int]) -> None:
    """Whether they are answered, refused or end the stream, before their turn or later."""
    handled: dict[bytes, Future[bytes]] = {}

    async def handle(message: bytes, _call: Call, _reservation: None) -> bytes:
        Message.alive.add(bytes(message))
        return await result_of(handled.setdefault(bytes(message), Future()))

    observed, call, refused = Observed(), ScriptedCall(), 0
    served = calls_of(Method(kind="ordered stream", handle=handle, right=None), events=observed)
    call.begin(served.serve)
    Message.alive.clear()
    gc.disable()
    try:
        for number, step in enumerate(steps):
            if step < 4:
                call.deliver(Message(number))
            elif step == 9:
                if call.has_sends:
                    call.complete_send()
            elif handled:
                future = handled.pop([*handled][step % len(handled)])
                if step < 6:
                    future.set_result(b"reply")
                else:
                    error = OverloadedError("full")
                    error.reply = b"" if step == 8 else b"refused"
                    refused += bool(error.reply)
                    future.set_exception(error)
                    del error
                del future
            assert Message.alive == handled.keys()
        call.cancel()
        assert Message.alive == set()
    finally:
        gc.enable()
    assert observed.refusals == ["OVERLOADED"] * (refused + bool(call.reason))


def test_replies_of_a_stream_keep_their_order_and_its_window() -> None:
    handler = Handler()
    call = started(method_of(handler, "ordered stream"))
    for name in (b"a", b"b", b"c"):
        call.deliver(name)
    assert not call.is_receiving
    for future in reversed(handler.futures):
        future.set_result(b" done")
    assert call.sent == [b"a done"]
    assert not call.is_receiving
    call.complete_send()
    assert call.sent == [b"a done", b"b done"]
    assert call.is_receiving
    call.deliver(None)
    call.complete_send()
    assert call.status_code is None
    call.complete_send()
    assert (call.sent, call.status_code) == ([b"a done", b"b done", b"c done"], grpc.StatusCode.OK)


@every_kind
def test_an_unexpected_error_ends_the_call_with_a_fixed_text(kind: CallKind) -> None:
    class Failing(Handler):
        def begin(self, message: bytes) -> "Future[bytes]":  # noqa: ARG002
            raise ValueError("a secret")

    call = started(method_of(Failing(), kind))
    call.deliver(b"a")
    assert call.status_code is grpc.StatusCode.INTERNAL
    call.deliver(b"b")  # of a stream that failed
    call.complete()
    assert call.is_closed


def test_a_stream_that_is_idle_for_too_long_ends_and_a_busy_one_does_not() -> None:
    handler = Handler()
    call = started(method_of(handler, "ordered stream"), LIMITS)
    call.deliver(b"a")
    call.wait_long()
    assert call.status_code is None
    handler.futures[0].set_result(b"")
    call.complete_send()
    call.wait_long()
    assert call.reason == "STREAM_IDLE"


@pytest.mark.parametrize("is_inference", [True, False])
def test_a_drain_answers_a_message_that_is_on_its_way_and_waits_for_no_other(*, is_inference: bool) -> None:
    handler = Handler()
    calls = calls_of(replace(method_of(handler), is_inference=is_inference))
    on_its_way, silent = ScriptedCall(), ScriptedCall()
    for call in (on_its_way, silent):
        call.begin(calls.serve)
    calls.drain()
    on_its_way.deliver(b"a")
    for call in (on_its_way, silent):
        call.wait_long()
    handler.futures[0].set_result(b" done")
    assert on_its_way.sent == [b"a done"]
    assert (silent.status_code, silent.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")


@pytest.mark.parametrize(("deadline", "is_refused"), [(1.0, True), (math.inf, False)])
def test_a_late_call_is_refused_before_its_message(deadline: float, *, is_refused: bool) -> None:
    def check(checked: float, caller: object) -> None:
        assert (checked, caller) == (deadline, ANYONE)
        raise OverloadedError("too late")

    call = ScriptedCall(deadline)
    call.begin(calls_of(replace(method_of(Handler()), is_inference=True), check_deadline=check).serve)
    assert (call.is_receiving, call.reason) == ((False, "OVERLOADED") if is_refused else (True, ""))
