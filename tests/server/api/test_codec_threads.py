"""Large requests and replies: handled on codec threads, in order, and dropped when nobody waits for them."""

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.inference import LARGE_REPLY_BYTES, Inference
from attention_serving.server.api.method import LARGE_BYTES, CallKind, Method, of_names
from attention_serving.server.api.protobuf_bytes import Parsed
from attention_serving.server.coroutines import Task, result_of
from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from attention_serving.server.engine.types import Result
from attention_serving.server.transport.call import Call
from tests.server.api.scripted import started
from tests.server.seams import PATIENCE_SECONDS
from tests.support.coroutines import run

LARGE, SMALL = b"L" * (LARGE_BYTES + 1), b"s"
LARGE_RESULT = Result({"context_vectors": [np.zeros(LARGE_REPLY_BYTES, np.float32)]})
SMALL_RESULT = Result({"context_vectors": [np.zeros(4, np.float32)]})
LIMIT = 10 * LARGE_BYTES
CODEC = "codec"


class Handler(Inference):
    """A method whose models and results the test provides. Notes on which thread it does what."""

    def __init__(self, threads: CodecThreads) -> None:
        self._threads = threads
        self._read = self._parse
        self._cache: Any = SimpleNamespace(get=lambda *_: None, keep=lambda *_: None)
        self._engine: Any = SimpleNamespace(run=self._run)
        self.futures: list[Future[Result]] = []
        self.parsed_on: list[str] = []
        self.decoded_on: list[str] = []
        self.encoded_on: list[str] = []
        self.error: Exception | None = None
        self.has_many_texts = False
        self.result_bytes = 0
        self.may_decode = threading.Event()
        self.may_decode.set()
        self.may_encode = threading.Event()
        self.may_encode.set()
        self.entered = threading.Event()

    def _parse(self, message: bytes) -> Parsed[Any]:
        self.parsed_on.append(threading.current_thread().name)
        return Parsed(message, message, {})

    def _is_slow(self, _parsed: Parsed[Any]) -> bool:
        return self.has_many_texts

    def _validated(self, parsed: Parsed[Any], _call: Call, reservation: Reservation) -> Any:
        self.decoded_on.append(threading.current_thread().name)
        reservation.add(self.result_bytes)
        self.entered.set()
        assert self.may_decode.wait(PATIENCE_SECONDS)
        if self.error is not None:
            raise self.error
        return None, SimpleNamespace(model=SimpleNamespace(name=""), deadline=math.inf), parsed.message[:1]

    async def _run(self, *_: object) -> Result:
        future: Future[Result] = Future()
        self.futures.append(future)
        return await result_of(future)

    def _encode(self, reply: Any, result: Result, _request_id: str) -> bytes:
        self.encoded_on.append(threading.current_thread().name)
        self.entered.set()
        assert self.may_encode.wait(PATIENCE_SECONDS)
        name: bytes = reply
        return name + bytes([len(result.outputs)])

    def _decode(self, *_: object) -> Any:
        raise AssertionError("`_validated` is replaced")

    @property
    def threads(self) -> list[str]:
        """Where each step was done, in order."""
        return self.parsed_on + self.decoded_on + self.encoded_on


class AnsweringHandler(Handler):
    """A method of a stream, which answers what fails."""

    is_stream = True

    def _leading_id(self, message: bytes) -> str:
        return message[:1].decode()

    def _failed(self, request_id: str, error: Exception) -> bytes:
        assert isinstance(error, OverloadedError)
        return (request_id + error.reason).encode()


@pytest.fixture
def threads() -> Iterator[CodecThreads]:
    threads = CodecThreads(1)
    yield threads
    threads.close()


@pytest.fixture
def handler(threads: CodecThreads) -> Handler:
    return Handler(threads)


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(LIMIT)


@pytest.fixture
def unary(handler: Handler, budget: MemoryBudget) -> Method:
    return Method(handle=handler.handle, right=None, budget=budget)


@pytest.fixture
def stream(handler: Handler, budget: MemoryBudget) -> Method:
    return Method(kind=CallKind.ORDERED_STREAM, handle=handler.handle, right=None, budget=budget)


def main() -> str:
    return threading.current_thread().name


def test_a_large_request_is_decoded_and_a_large_reply_encoded_on_a_codec_thread(
    unary: Method, handler: Handler, budget: MemoryBudget
) -> None:
    handler.result_bytes = 2 * LARGE_REPLY_BYTES
    budget.limit_bytes += handler.result_bytes
    call = started(unary)
    call.deliver(LARGE)
    assert budget.held_bytes == len(LARGE)
    call.run_posted()
    call.run_posted()
    handler.futures[0].set_result(LARGE_RESULT)
    call.run_posted()
    assert (call.sent, handler.threads) == ([b"L\1"], [CODEC] * 3)
    assert budget.held_bytes == len(LARGE) + handler.result_bytes
    call.complete()
    assert budget.held_bytes == 0


@pytest.mark.parametrize("reserved", [0, 2 * LARGE_REPLY_BYTES], ids=["little", "much"])
def test_a_small_request_with_a_small_reply_stays_on_the_thread_of_the_transport(
    unary: Method, handler: Handler, budget: MemoryBudget, reserved: int
) -> None:
    handler.result_bytes = reserved
    budget.limit_bytes += reserved
    call = started(unary)
    call.deliver(SMALL)
    handler.futures[0].set_result(SMALL_RESULT)
    assert (call.sent, handler.threads) == ([b"s\1"], [main()] * 3)
    assert budget.held_bytes == len(SMALL) + reserved
    call.complete()
    assert budget.held_bytes == 0


def test_a_slow_request_is_decoded_on_a_codec_thread_whose_error_ends_the_call(
    unary: Method, handler: Handler, budget: MemoryBudget
) -> None:
    handler.has_many_texts, handler.error = True, InvalidRequestError("query", "is wrong")
    call = started(unary)
    call.deliver(SMALL)
    call.run_posted()
    assert (handler.parsed_on, handler.decoded_on) == ([main()], [CODEC])
    assert call.ended_with is grpc.StatusCode.INVALID_ARGUMENT
    call.complete()
    assert budget.held_bytes == 0


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_a_request_whose_call_ended_while_it_waited_is_dropped(
    kind: str, request: pytest.FixtureRequest, threads: CodecThreads, handler: Handler, budget: MemoryBudget
) -> None:
    gate, done = threading.Event(), threading.Event()
    in_order(threads, gate.wait)
    call = started(request.getfixturevalue(kind))
    call.deliver(LARGE)
    call.cancel()
    in_order(threads, done.set)
    gate.set()
    assert done.wait(PATIENCE_SECONDS)
    call.run_posted()
    assert (handler.threads, budget.held_bytes) == ([], 0)


def in_order(threads: CodecThreads, work: Callable[[], object]) -> None:
    """Has a thread call a function, once what it was given before is done."""
    Task(threads.run(work, math.inf), lambda _: None).resume()


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_a_result_for_a_call_that_ended_while_it_was_decoded_is_not_computed(
    kind: str, request: pytest.FixtureRequest, handler: Handler, budget: MemoryBudget
) -> None:
    handler.may_decode.clear()
    call = started(request.getfixturevalue(kind))
    call.deliver(LARGE)
    call.run_posted()
    assert handler.entered.wait(PATIENCE_SECONDS)
    call.cancel()
    assert budget.held_bytes == len(LARGE)  # the message is still being decoded
    handler.may_decode.set()
    call.run_posted()
    assert handler.futures == []
    assert (call.sent, budget.held_bytes) == ([], 0)


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_the_memory_of_a_reply_is_held_while_it_is_encoded_although_the_call_has_ended(
    kind: str, request: pytest.FixtureRequest, handler: Handler, budget: MemoryBudget
) -> None:
    handler.result_bytes = 2 * LARGE_REPLY_BYTES
    budget.limit_bytes += handler.result_bytes
    handler.may_encode.clear()
    call = started(request.getfixturevalue(kind))
    call.deliver(SMALL)
    handler.entered.clear()
    handler.futures[0].set_result(LARGE_RESULT)
    assert handler.entered.wait(PATIENCE_SECONDS)
    call.cancel()
    assert budget.held_bytes == len(SMALL) + handler.result_bytes
    handler.may_encode.set()
    call.run_posted()
    assert (call.sent, budget.held_bytes) == ([], 0)


def test_a_request_of_a_stream_without_memory_is_refused_in_its_place(
    threads: CodecThreads, budget: MemoryBudget
) -> None:
    """And so it would be as the only request of its call, before anything is decoded."""
    handler = AnsweringHandler(threads)
    taken = budget.reserve(LIMIT)
    call = started(Method(kind=CallKind.ORDERED_STREAM, handle=handler.handle, right=None, budget=budget))
    call.deliver(LARGE)
    assert (call.sent, call.ended_with) == ([b"LOVERLOADED"], None)
    taken.release()
    call.deliver(SMALL)
    assert handler.threads == [main()] * 2


def fail(error: Exception) -> None:
    raise error


def test_work_that_fails_does_not_end_a_codec_thread(threads: CodecThreads) -> None:
    for error in (ValueError("unexpected"), EngineError("expected")):
        with pytest.raises(type(error), match="expected"):
            run(threads.run(partial(fail, error), math.inf))
    assert run(threads.run(lambda: threading.current_thread().name, math.inf)) == CODEC


def test_work_after_its_deadline_is_not_done(threads: CodecThreads) -> None:
    done: list[None] = []
    with pytest.raises(DeadlineExceededError):
        run(threads.run(partial(done.append, None), 0.0))
    assert done == []


def test_a_request_of_names_has_a_limit_of_its_own() -> None:
    handled: list[bytes] = []

    def handle(request: bytes, _call: Call) -> None:
        handled.append(request)

    call = started(of_names(bytes, handle, right=None))
    call.deliver(LARGE)
    assert (handled, call.ended_with) == ([], grpc.StatusCode.INVALID_ARGUMENT)
