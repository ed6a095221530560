"""Large requests and replies: handled on codec threads, in order, and dropped when nobody waits for them."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest

from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.errors import InvalidRequestError, OverloadedError
from attention_serving.server.engine.types import Result
from attention_serving.server.rpc.calls.codec_threads import CodecThreads
from attention_serving.server.rpc.calls.deferred import DeferredReply
from attention_serving.server.rpc.calls.intake import LARGE_BYTES, LARGE_REPLY_BYTES, Intake
from attention_serving.server.rpc.calls.ordered_stream import OrderedStream
from attention_serving.server.rpc.calls.method import CallKind, Route, tensors
from attention_serving.server.rpc.calls.single_request import UnaryCall
from attention_serving.server.rpc.transport.seam import Call, Callback
from tests.server.rpc.calls.scripted import FREELY, ScriptedCall
from tests.server.seams import PATIENCE_SECONDS

LARGE, SMALL = b"L" * (LARGE_BYTES + 1), b"s"
LARGE_RESULT = Result({"context_vectors": [np.zeros(LARGE_REPLY_BYTES, np.float32)]})
SMALL_RESULT = Result({"context_vectors": [np.zeros(4, np.float32)]})
LIMIT = 10 * LARGE_BYTES


class ThreadedCall(ScriptedCall):
    """A scripted call whose callbacks from other threads wait until the test runs them."""

    def __init__(self, deadline: float = 1e9) -> None:
        super().__init__(deadline)
        self._own = threading.get_ident()
        self._posted: list[Callback] = []
        self._changed = threading.Condition()

    def call_soon_threadsafe(self, callback: Callback) -> None:
        if threading.get_ident() == self._own:
            callback()
            return
        with self._changed:
            self._posted.append(callback)
            self._changed.notify()

    def run_posted(self) -> None:
        """Waits for a callback of another thread, and runs it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._posted, PATIENCE_SECONDS)
            callback = self._posted.pop(0)
        callback()


class Handler:
    """Replies later, or fails. Notes on which thread it handles and encodes."""

    def __init__(self) -> None:
        self.futures: list[Future[Result]] = []
        self.threads: list[str] = []
        self.error: Exception | None = None
        self.result_bytes = 0
        self.may_handle = threading.Event()
        self.may_handle.set()
        self.entered = threading.Event()

    def handle(self, request: bytes, call: Call, reservation: Reservation) -> DeferredReply:  # noqa: ARG002
        reservation.add(self.result_bytes)
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        assert self.may_handle.wait(PATIENCE_SECONDS)
        if self.error is not None:
            raise self.error
        future: Future[Result] = Future()
        self.futures.append(future)
        return DeferredReply(future, partial(self._encode, request[:1]))

    def _encode(self, name: bytes, future: Future[Result]) -> bytes:
        self.threads.append(threading.current_thread().name)
        return name + bytes([len(future.result().outputs)])


@pytest.fixture
def intake() -> Iterator[Intake]:
    threads = CodecThreads(1)
    yield Intake(MemoryBudget(LIMIT), threads)
    threads.close()


def route(handler: Handler, intake: Intake, **options: Any) -> Route:
    return tensors(CallKind.ORDERED_STREAM, bytes, handler.handle, bytes, intake, **options)


def main() -> str:
    return threading.current_thread().name


def test_a_small_request_with_a_small_reply_stays_on_the_thread_of_the_transport(intake: Intake) -> None:
    call, handler = ThreadedCall(), Handler()
    UnaryCall(call, route(handler, intake), FREELY.received)
    call.deliver(SMALL)
    handler.futures[0].set_result(SMALL_RESULT)
    assert (call.sent, handler.threads) == ([b"s\1"], [main(), main()])
    assert intake.budget.held_bytes == 0


def test_a_large_request_is_handled_and_a_large_reply_encoded_on_a_codec_thread(intake: Intake) -> None:
    call, handler = ThreadedCall(), Handler()
    handler.result_bytes = 2 * LARGE_REPLY_BYTES
    UnaryCall(call, route(handler, intake), FREELY.received)
    call.deliver(LARGE)
    assert intake.budget.held_bytes == len(LARGE)
    call.run_posted()
    handler.futures[0].set_result(LARGE_RESULT)
    call.run_posted()
    assert (call.sent, handler.threads) == ([b"L\1"], ["codec", "codec"])
    assert intake.budget.held_bytes == 0


def test_a_large_request_that_is_known_stays_on_the_thread_of_the_transport(intake: Intake) -> None:
    call, handler = ThreadedCall(), Handler()
    UnaryCall(call, route(handler, intake, recall=lambda data: b"known " + data), FREELY.received)
    call.deliver(LARGE)
    handler.futures[0].set_result(SMALL_RESULT)
    assert (call.sent, handler.threads) == ([b"k\1"], [main(), main()])


def test_a_slow_request_is_handled_on_a_codec_thread(intake: Intake) -> None:
    call, handler = ThreadedCall(), Handler()
    UnaryCall(call, route(handler, intake, is_slow=lambda request: request == SMALL), FREELY.received)
    call.deliver(SMALL)
    call.run_posted()
    assert handler.threads == ["codec"]


def test_an_error_on_a_codec_thread_ends_the_call_like_any_other(intake: Intake) -> None:
    call, handler = ThreadedCall(), Handler()
    handler.error = InvalidRequestError("query", "is wrong")
    UnaryCall(call, route(handler, intake), FREELY.received)
    call.deliver(LARGE)
    call.run_posted()
    assert call.ended_with is grpc.StatusCode.INVALID_ARGUMENT
    assert intake.budget.held_bytes == 0


def test_replies_of_a_stream_keep_their_order_beside_a_large_request(intake: Intake) -> None:
    call, handler = ThreadedCall(), Handler()
    handler.may_handle.clear()
    stream = OrderedStream(call, route(handler, intake, is_slow=lambda _: False), 3, FREELY)
    call.deliver(LARGE)
    assert handler.entered.wait(PATIENCE_SECONDS)
    handler.may_handle.set()
    call.run_posted()
    call.deliver(SMALL)
    handler.futures[1].set_result(SMALL_RESULT)
    assert (call.sent, len(stream)) == ([], 2)
    handler.futures[0].set_result(SMALL_RESULT)
    assert call.sent == [b"L\1"]
    call.complete_send()
    assert call.sent == [b"L\1", b"s\1"]
    assert intake.budget.held_bytes == len(SMALL)
    call.complete_send()
    assert intake.budget.held_bytes == 0
    assert call.done_callbacks == {}


def test_a_request_whose_call_ended_while_it_waited_is_dropped(intake: Intake) -> None:
    gate = threading.Event()
    intake.threads.submit(gate.wait)
    call, handler = ThreadedCall(), Handler()
    UnaryCall(call, route(handler, intake), FREELY.received)
    call.deliver(LARGE)
    call.cancel()
    done = threading.Event()
    intake.threads.submit(done.set)
    gate.set()
    assert done.wait(PATIENCE_SECONDS)
    assert (handler.threads, intake.budget.held_bytes) == ([], 0)


def test_a_result_for_a_call_that_ended_while_it_was_decoded_is_not_computed(intake: Intake) -> None:
    call, handler = ThreadedCall(), Handler()
    handler.may_handle.clear()
    UnaryCall(call, route(handler, intake), FREELY.received)
    call.deliver(LARGE)
    assert handler.entered.wait(PATIENCE_SECONDS)
    call.cancel()
    assert intake.budget.held_bytes == len(LARGE)  # the message is still being decoded
    handler.may_handle.set()
    call.run_posted()
    with pytest.raises(CancelledError):
        handler.futures[0].result(PATIENCE_SECONDS)
    assert (call.sent, intake.budget.held_bytes) == ([], 0)


def test_a_request_whose_deadline_passed_while_it_waited_is_not_decoded(intake: Intake) -> None:
    call, handler = ThreadedCall(deadline=0.0), Handler()
    UnaryCall(call, route(handler, intake), FREELY.received)
    call.deliver(LARGE)
    call.run_posted()
    assert (handler.threads, call.ended_with) == ([], grpc.StatusCode.DEADLINE_EXCEEDED)


def test_a_request_without_memory_is_refused_before_it_is_decoded(intake: Intake) -> None:
    intake.budget.reserve(LIMIT)
    call, handler = ThreadedCall(), Handler()
    UnaryCall(call, route(handler, intake), FREELY.received)
    call.deliver(LARGE)
    assert (handler.threads, call.ended_with) == ([], grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_a_request_of_a_stream_without_memory_is_refused_in_its_place(intake: Intake) -> None:
    taken = intake.budget.reserve(LIMIT)
    call, handler = ThreadedCall(), Handler()

    def refuse(message: bytes, error: OverloadedError) -> bytes:
        return message[:1] + error.reason.encode()

    OrderedStream(call, route(handler, intake, refuse=refuse), 3, FREELY)
    call.deliver(LARGE)
    assert (call.sent, call.ended_with) == ([b"LOVERLOADED"], None)
    taken.release()
    call.deliver(SMALL)
    assert handler.threads == [main()]


def test_work_that_fails_does_not_end_a_codec_thread() -> None:
    threads, done = CodecThreads(1), threading.Event()

    def fail() -> None:
        raise ValueError("unexpected")

    threads.submit(fail)
    threads.submit(done.set)
    assert done.wait(PATIENCE_SECONDS)
    threads.close()


def test_a_request_of_names_has_a_limit_of_its_own() -> None:
    call = ThreadedCall()
    handled: list[bytes] = []
    plain = Route(CallKind.UNARY, bytes, lambda request, _call: handled.append(request), bytes)
    UnaryCall(call, plain, FREELY.received)
    call.deliver(LARGE)
    assert (handled, call.ended_with) == ([], grpc.StatusCode.INVALID_ARGUMENT)
