"""Calls whose results come later: order, windows and deadlines; nothing is done for a call that has ended."""

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace

import grpc
import numpy as np
import pytest

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.admission import Admission
from attention_serving.server.api.calls import Calls
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.method import CallKind, Method
from attention_serving.server.api.open_inference.service import ModelInfer, ModelStreamInfer
from attention_serving.server.coroutines import result_of
from attention_serving.server.engine.errors import OverloadedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.schedule.fair_shares import ANYONE
from attention_serving.server.transport.call import Call
from tests.server.api.messages import raw_request
from tests.server.api.scripted import METHOD, UNLIMITED, ScriptedCall, calls_of, started
from tests.server.samples import request_of
from tests.server.seams import PATIENCE_SECONDS, Gate, WatchedEngine, tapped
from tests.server.seams import Calls as Observed
from tests.support.coroutines import submitted

CALL_DEADLINE = 1e9
LIMITS = replace(UNLIMITED, receive_timeout_seconds=60, stream_idle_seconds=60)
Send = Callable[[bytes], None]


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

    def watch(self, message: bytes, _call: Call, send: Send) -> Callable[[], None]:
        self.begin(message).add_done_callback(lambda future: send(message + future.result()))
        return lambda: self.ended.append(message)


def unary(handler: Handler) -> Method:
    return Method(handle=handler.answer, right=None)


def ordered_stream(handler: Handler) -> Method:
    return Method(kind=CallKind.ORDERED_STREAM, handle=handler.answer, right=None)


def server_stream(handler: Handler) -> Method:
    return Method(kind=CallKind.SERVER_STREAMING, handle=handler.watch, right=None)


KINDS: dict[str, Callable[[Handler], Method]] = {
    "unary": unary,
    "ordered stream": ordered_stream,
    "server stream": server_stream,
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@every_kind
def test_a_reply_is_sent_when_its_result_is_there(kind: Callable[[Handler], Method]) -> None:
    handler = Handler()
    call = started(kind(handler))
    call.deliver(b"a")
    assert call.sent == []
    handler.futures[0].set_result(b" done")
    assert call.sent == [b"a done"]
    assert call.timers == {}


@every_kind
def test_the_end_of_the_call_ends_what_it_waits_for(kind: Callable[[Handler], Method]) -> None:
    handler = Handler()
    call = started(kind(handler))
    call.deliver(b"a")
    assert handler.ended == []
    call.cancel()
    assert (call.sent, handler.ended) == ([], [b"a"])
    if kind is server_stream:
        handler.futures[0].set_result(b" done")
        assert call.sent == []
    else:
        with pytest.raises(CancelledError):
            handler.futures[0].result(0)


def leaves(call: ScriptedCall, _handler: Handler) -> None:
    call.cancel()


def is_answered(call: ScriptedCall, handler: Handler) -> None:
    call.deliver(b"a")
    handler.futures[0].set_result(b" done")
    if call.has_sends:
        call.complete_send()
    if call.is_receiving:
        call.deliver(None)
    call.finish(grpc.StatusCode.OK)  # of a server stream, which would go on
    call.complete()


def is_refused(call: ScriptedCall, _handler: Handler) -> None:
    call.deliver(None)
    call.complete()


@every_kind
@pytest.mark.parametrize("end", [leaves, is_answered, is_refused])
def test_a_call_that_has_ended_is_freed_by_reference_counting(
    kind: Callable[[Handler], Method], end: Callable[[ScriptedCall, Handler], None]
) -> None:
    """With it goes what the core keeps of it, such as a reply that its caller did not take."""
    handler = Handler()
    call = started(kind(handler), limits=LIMITS)
    freed = weakref.ref(call)
    gc.disable()
    try:
        end(call, handler)
        handler.futures.clear()
        del call
        assert freed() is None
    finally:
        gc.enable()


@every_kind
@pytest.mark.parametrize("message", [b"a", None], ids=["message", "no message"])
def test_a_message_after_the_end_of_the_call_is_not_handled(
    kind: Callable[[Handler], Method], message: bytes | None
) -> None:
    handler = Handler()
    call = started(kind(handler))
    call.cancel()
    call.deliver(message)
    assert handler.requests == []
    assert not call.is_receiving
    assert call.ended_with is grpc.StatusCode.CANCELLED


@every_kind
def test_a_call_without_a_request_is_told_so(kind: Callable[[Handler], Method]) -> None:
    handler = Handler()
    call = started(kind(handler))
    call.deliver(None)
    is_stream = kind is ordered_stream
    assert call.ended_with is (grpc.StatusCode.OK if is_stream else grpc.StatusCode.UNIMPLEMENTED)
    assert handler.requests == []


@every_kind
def test_a_call_ends_once_its_status_was_sent(kind: Callable[[Handler], Method]) -> None:
    """Until then it holds its place."""
    handler = Handler()
    calls = calls_of(kind(handler))
    call = ScriptedCall()
    call.begin(calls.serve)
    assert calls.load().waiting == 1
    call.deliver(b"a")
    call.finish(grpc.StatusCode.ABORTED)
    call.complete()
    assert (call.task.is_closed, calls.load().waiting, handler.ended) == (True, 0, [b"a"])


def test_replies_of_a_stream_keep_their_order_and_its_window() -> None:
    handler = Handler()
    call = started(ordered_stream(handler), window=3)
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
    assert call.ended_with is None
    call.complete_send()
    assert (call.sent, call.ended_with) == ([b"a done", b"b done", b"c done"], grpc.StatusCode.OK)


def test_a_server_stream_sends_one_message_at_a_time() -> None:
    sends: list[Send] = []

    def watch(_message: bytes, _call: Call, send: Send) -> Callable[[], None]:
        sends.append(send)
        return lambda: None

    call = started(Method(kind=CallKind.SERVER_STREAMING, handle=watch, right=None))
    call.deliver(b"a")
    for message in (b"1", b"2"):
        sends[0](message)
    assert call.sent == [b"1"]
    call.complete_send()
    assert call.sent == [b"1", b"2"]
    call.cancel()
    sends[0](b"3")
    assert call.sent == [b"1", b"2"]


@every_kind
def test_an_unexpected_error_ends_the_call_with_a_fixed_text(kind: Callable[[Handler], Method]) -> None:
    class Failing(Handler):
        def begin(self, message: bytes) -> "Future[bytes]":  # noqa: ARG002
            raise ValueError("a secret")

    call = started(kind(Failing()))
    call.deliver(b"a")
    assert call.ended_with is grpc.StatusCode.INTERNAL
    call.complete()
    assert call.task.is_closed


def test_a_stream_that_is_idle_for_too_long_ends_and_a_busy_one_does_not() -> None:
    handler = Handler()
    limits = replace(UNLIMITED, max_concurrent_calls=1, max_streams=1, stream_idle_seconds=5)
    call = started(ordered_stream(handler), limits=limits)
    call.deliver(b"a")
    call.transport.sweep(call.transport.now + 100)
    assert call.ended_with is None
    handler.futures[0].set_result(b"")
    call.complete_send()
    call.transport.sweep(call.transport.now + 100)
    assert call.reason == "STREAM_IDLE"


@every_kind
def test_a_caller_that_does_not_take_the_status_is_cut_off(kind: Callable[[Handler], Method]) -> None:
    handler = Handler()
    limits = replace(UNLIMITED, max_concurrent_calls=1, max_streams=1, stream_idle_seconds=50)
    call = ScriptedCall(send_timeout_seconds=5)
    call.begin(calls_of(kind(handler), limits=limits).serve)
    call.deliver(b"a")
    if kind is ordered_stream:
        call.deliver(None)
        handler.futures[0].set_result(b"")
        call.complete_send()
        assert call.ended_with is grpc.StatusCode.OK
    else:
        call.finish(grpc.StatusCode.ABORTED)
    call.transport.sweep(call.transport.now + 6)
    assert (call.reader_cut, call.is_aborted) == (True, True)


class TimedRequests:
    """Requests of the Open Inference Protocol with a timeout, queued behind one whose run is held."""

    def __init__(self, model: LoadedModel, kind: CallKind) -> None:
        self.gate, self.model = Gate(), model
        self.engine = WatchedEngine([tapped(model, self.gate)], Limits())
        self.threads = CodecThreads(1)
        method = (ModelInfer if kind is CallKind.UNARY else ModelStreamInfer)(self.engine, self.threads)
        self._method = Method(kind=kind, handle=method.handle, right=None, budget=self.engine.budget)
        tapped_model = self.engine.model(model.name)
        self.held = submitted(self.engine, tapped_model, request_of(model, [(2, 2)]))
        assert self.gate.entered.wait(PATIENCE_SECONDS)

    def call(self, **timeout: int) -> ScriptedCall:
        """A call whose request is queued."""
        call = started(self._method, CALL_DEADLINE)
        tensor = np.zeros((1, 2, 4), np.float32)
        message = raw_request(self.model, {"query": tensor})
        for name, microseconds in timeout.items():
            message.parameters[name].int64_param = microseconds
        call.deliver(message.SerializeToString())
        assert self.engine.load().queued_sequences == 1
        return call

    def close(self) -> None:
        self.gate.open()
        self.engine.close()
        self.threads.close()


both_kinds = pytest.mark.parametrize("kind", [CallKind.UNARY, CallKind.ORDERED_STREAM], ids=lambda k: k.name)


@pytest.fixture
def timed(self_model: LoadedModel, kind: CallKind) -> Iterator[TimedRequests]:
    timed = TimedRequests(self_model, kind)
    yield timed
    timed.close()


@both_kinds
def test_the_timeout_of_a_request_is_kept_within_the_call(timed: TimedRequests, kind: CallKind) -> None:
    call = timed.call(timeout=60_000_000)
    assert len(call.timers) == 1
    call.run_timers()
    assert timed.engine.load().queued_sequences == 0
    assert timed.engine.recorder.failed == [(timed.model.name, "DEADLINE_EXCEEDED")]
    if kind is CallKind.UNARY:
        assert (call.sent, call.ended_with) == ([], grpc.StatusCode.DEADLINE_EXCEEDED)
    else:
        (reply,) = call.sent
        assert "deadline passed" in pb.ModelStreamInferResponse.FromString(reply).error_message
        assert call.ended_with is None


@both_kinds
def test_a_timer_ends_with_its_request(timed: TimedRequests) -> None:
    call = timed.call(timeout=60_000_000)
    timed.gate.open()
    call.run_posted()
    assert (len(call.sent), call.timers) == (1, {})


def test_a_message_of_a_stream_that_failed_is_not_handled() -> None:
    handler = Handler()
    call = started(ordered_stream(handler))
    call.deliver(b"a")
    handler.futures[0].set_exception(ValueError("not a failure of the engine"))
    assert call.ended_with is grpc.StatusCode.INTERNAL
    call.deliver(b"b")
    assert handler.requests == [b"a"]


@pytest.mark.parametrize("is_inference", [True, False])
def test_a_drain_answers_a_message_that_is_on_its_way_and_waits_for_no_other(*, is_inference: bool) -> None:
    handler = Handler()
    calls = calls_of(replace(unary(handler), is_inference=is_inference))
    on_its_way, silent = ScriptedCall(), ScriptedCall()
    for call in (on_its_way, silent):
        call.begin(calls.serve)
    calls.drain()
    on_its_way.deliver(b"a")
    for call in (on_its_way, silent):
        call.run_timers()
    handler.futures[0].set_result(b" done")
    assert on_its_way.sent == [b"a done"]
    assert (silent.ended_with, silent.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")


def test_an_observer_that_fails_keeps_no_place() -> None:
    class Failing(Observed):
        def call_ended(self, method: str, code: str, seconds: float) -> None:
            raise RuntimeError(method, code, seconds)

    calls = calls_of(replace(unary(Handler()), is_inference=True), observer=Failing())
    call = ScriptedCall()
    call.begin(calls.serve)
    call.deliver(b"a")
    assert calls.load().calls == 1
    with pytest.raises(RuntimeError):
        call.cancel()
    assert calls.load().calls == 0


@pytest.mark.parametrize(("deadline", "is_refused"), [(1.0, True), (math.inf, False)])
def test_a_call_that_would_be_answered_too_late_is_refused_before_its_message(
    deadline: float, *, is_refused: bool
) -> None:
    def check(checked: float, caller: object) -> None:
        assert (checked, caller) == (deadline, ANYONE)
        raise OverloadedError("too late")

    method = replace(unary(Handler()), is_inference=True)
    call = ScriptedCall(deadline)
    call.begin(Calls({METHOD: method}, Observed(), Admission(UNLIMITED, check), stream_window=3).serve)
    assert (call.is_receiving, call.reason) == ((False, "OVERLOADED") if is_refused else (True, ""))
