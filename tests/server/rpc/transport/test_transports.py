"""What other threads leave to the thread that takes every call."""

import queue
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import pytest

from server.rpc.transport.completion_queue import CompletionQueueTransport
from server.rpc.transport.seam import Call
from tests.server.seams import PATIENCE_SECONDS

ANSWER = b"answer"


class Asked:
    """A server with one call, which waits for its answer."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._server = CompletionQueueTransport({})
        port = self._server.listen("127.0.0.1:0")
        self._server.start(accept=self._calls.put, run_inline=lambda: False)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        method: Any = self._channel.unary_unary("/any/Method")
        self.answer = method.future(b"", timeout=PATIENCE_SECONDS)
        self.call = self._calls.get(timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        self._channel.close()
        self._server.stop(0)


@pytest.fixture
def asked() -> Iterator[Asked]:
    asked = Asked()
    yield asked
    asked.close()


def test_errands_are_run_in_their_order_on_the_calls_thread(asked: Asked) -> None:
    ran: list[tuple[int, str]] = []

    def note(number: int) -> None:
        ran.append((number, threading.current_thread().name))

    for number in range(100):
        asked.call.call_soon_threadsafe(partial(note, number))
    asked.call.call_soon_threadsafe(lambda: asked.call.reply(ANSWER))
    assert asked.answer.result(PATIENCE_SECONDS) == ANSWER
    assert ran == [(number, "calls") for number in range(100)]


def test_an_errand_of_the_calls_thread_itself_is_run_at_once(asked: Asked) -> None:
    order: list[str] = []

    def outer() -> None:
        asked.call.call_soon_threadsafe(lambda: order.append("inner"))
        order.append("outer")
        asked.call.reply(ANSWER)

    asked.call.call_soon_threadsafe(outer)
    asked.answer.result(PATIENCE_SECONDS)
    assert order == ["inner", "outer"]


def test_an_errand_that_fails_keeps_no_other_from_being_run(asked: Asked) -> None:
    asked.call.call_soon_threadsafe(lambda: 1 // 0)
    asked.call.call_soon_threadsafe(lambda: asked.call.reply(ANSWER))
    assert asked.answer.result(PATIENCE_SECONDS) == ANSWER


def test_errands_of_a_call_that_has_ended_are_dropped(asked: Asked) -> None:
    ran: list[str] = []
    asked.call.reply(ANSWER)
    asked.answer.result(PATIENCE_SECONDS)
    asked.call.call_soon_threadsafe(lambda: ran.append("late"))
    asked.close()
    assert not ran
