"""Calls whose coroutines do what the test says, one step after the other."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc

from attention_serving.server.coroutines import Wait, suspend
from attention_serving.server.transport.call import Call
from tests.server.seams import PATIENCE_SECONDS

T = TypeVar("T")
Step = Callable[[], Coroutine[Wait, Any, Any]]


class Driven:
    """Serves the calls of a transport. Each awaits what the test hands it, until the core is done with it."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._steps: defaultdict[Call, queue.SimpleQueue[Step]] = defaultdict(queue.SimpleQueue)
        self._ended: defaultdict[Call, threading.Event] = defaultdict(threading.Event)

    async def serve(self, call: Call) -> None:
        self.calls.put(call)
        steps = self._steps[call]
        try:
            while True:
                if steps.empty():
                    await suspend(lambda _: None)  # until `begin`
                await steps.get_nowait()()
        finally:
            self._ended[call].set()

    def next_call(self) -> Call:
        return self.calls.get(timeout=PATIENCE_SECONDS)

    def begin(self, call: Call, work: Callable[[], Coroutine[Wait, Any, T]]) -> "Future[T]":
        """Has the coroutine of a call await another. One at a time."""
        found: Future[T] = Future()

        async def step() -> None:
            found.set_result(await work())

        self._steps[call].put(step)
        call.task.wake()
        return found

    def begin_to_receive(self, call: Call) -> "Future[bytes | None]":
        """The next message of a call, later."""

        async def message() -> bytes | None:
            found: bytes | None = await call.message()
            return found

        return self.begin(call, message)

    def receive(self, call: Call) -> bytes | None:
        """The next message of a call."""
        return self.begin_to_receive(call).result(PATIENCE_SECONDS)

    def send(self, call: Call, message: bytes, *, more: bool = False) -> bool:
        """Sends a message, and waits until the core let it out."""
        return self.begin(call, lambda: call.send(message, more=more)).result(PATIENCE_SECONDS)

    def wait_for_end(self, call: Call) -> grpc.StatusCode | None:
        """How a call ended, once the core is done with it."""
        assert self._ended[call].wait(PATIENCE_SECONDS)
        return call.ended_with


def on_thread(call: Call, callback: Callable[[], T]) -> T:
    """What a callback returns on the transport's thread."""
    found: queue.SimpleQueue[T] = queue.SimpleQueue()
    call.post(lambda: found.put(callback()))
    return found.get(timeout=PATIENCE_SECONDS)
