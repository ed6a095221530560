"""Whether the transport's thread makes progress can be seen from outside."""

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from attention_serving.server.transport import TransportKind, create_transport
from attention_serving.server.transport.call import Call
from tests.server.seams import PATIENCE_SECONDS


@pytest.mark.parametrize("kind", TransportKind)
def test_an_idle_thread_turns_and_a_stuck_one_does_not(kind: TransportKind) -> None:
    transport = create_transport(kind, {}, max_calls=8)
    entered, proceed = threading.Event(), threading.Event()

    async def block(call: Call) -> None:
        entered.set()
        proceed.wait(PATIENCE_SECONDS)
        call.finish(grpc.StatusCode.UNIMPLEMENTED)

    port = transport.listen("127.0.0.1:0")
    transport.start(block, lambda: False)
    started = transport.now
    until(lambda: transport.now > started + 1)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        method: Any = channel.unary_unary("/a/B")
        call = method.future(b"", timeout=PATIENCE_SECONDS)
        assert entered.wait(PATIENCE_SECONDS)
        until(lambda: time.monotonic() - transport.now > 1.5)
        proceed.set()
        assert call.code() is grpc.StatusCode.UNIMPLEMENTED
        until(lambda: time.monotonic() - transport.now < 1.5)
    transport.stop(0, lambda: None)


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.02)
