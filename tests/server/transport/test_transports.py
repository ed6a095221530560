"""Calls as gRPC's core brings them. `tests/server/api/test_both_transports.py` shows the other adapter."""

import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest

from attention_serving.server.coroutines import suspend
from attention_serving.server.transport import TransportKind, completion_queue, create_transport
from attention_serving.server.transport.call import Call, Transport
from tests.server.samples import ROOT
from tests.server.seams import PATIENCE_SECONDS
from tests.server.transport.driven import Driven, on_thread

METHOD = "/any/Method"
REPLY = b"reply"
HOST = "127.0.0.1"
both_kinds = pytest.mark.parametrize("kind", TransportKind, ids=str)


def no_work() -> bool:
    return False


class Listening:
    """A started transport, whose calls the test answers."""

    def __init__(self) -> None:
        self.driven = Driven()
        self.transport = create_transport(TransportKind.COMPLETION_QUEUE, {}, max_calls=8)
        self.port = self.transport.listen(f"{HOST}:0")
        self.transport.start(self.driven.serve, no_work)
        self.channel = grpc.insecure_channel(f"{HOST}:{self.port}")

    def call(
        self, message: bytes = b"", timeout: float | None = PATIENCE_SECONDS, method: str = METHOD
    ) -> tuple[Any, Call]:
        """A unary call, as its caller sees it and as the transport hands it over."""
        callable_: Any = self.channel.unary_unary(method)
        sent = callable_.future(message, timeout=timeout)
        return sent, self.driven.next_call()

    def stream(self, messages: Iterator[bytes]) -> tuple[Any, Call]:
        """The same of a stream."""
        method: Any = self.channel.stream_stream(METHOD)
        return method(messages, timeout=PATIENCE_SECONDS), self.driven.next_call()


@pytest.fixture
def listening() -> Iterator[Listening]:
    listening = Listening()
    yield listening
    listening.channel.close()
    listening.transport.stop(0, no_work)


def answered(listening: Listening) -> bool:
    """Whether a further call is served as ever."""
    sent, call = listening.call()
    reply(call)
    return bool(sent.result() == REPLY)


@pytest.mark.parametrize("timeout", [PATIENCE_SECONDS, None], ids=["deadline", "none"])
def test_a_call_has_its_method_deadline_and_message(listening: Listening, timeout: float | None) -> None:
    sent, call = listening.call(b"question", timeout)
    assert call.method == METHOD
    # gRPC rounds a timeout up when it is sent.
    seconds = call.deadline - time.monotonic()
    assert seconds == math.inf if timeout is None else 0 < seconds < timeout + 1
    assert listening.driven.receive(call) == b"question"
    assert listening.driven.receive(call) is None
    reply(call)
    assert sent.result() == REPLY


def test_the_first_end_of_a_call_reaches_the_caller_with_details_and_metadata(listening: Listening) -> None:
    sent, call = listening.call()
    trailing = (("reason-bin", b"\0\xff"), ("reason", "why"))

    async def finish_often() -> tuple[bool, bytes | None]:
        call.finish(grpc.StatusCode.ABORTED, "ä detail", trailing)
        call.finish(grpc.StatusCode.INTERNAL, "second")
        call.reply(REPLY)
        found: bytes | None = await call.message()
        return await call.send(REPLY), found

    assert listening.driven.begin(call, finish_often).result(PATIENCE_SECONDS) == (False, None)
    assert (sent.code(), sent.details()) == (grpc.StatusCode.ABORTED, "ä detail")
    assert set(trailing) <= {(key, value) for key, value in sent.trailing_metadata()}
    assert listening.driven.wait_for_end(call) is grpc.StatusCode.ABORTED


def test_a_cancelled_call_ends_what_its_coroutine_waits_for(listening: Listening) -> None:
    """Its `finally` blocks run; if one of them fails, other calls are served as before."""
    sent, call = listening.call()
    began, closed = threading.Event(), threading.Event()

    async def wait_and_fail() -> None:
        try:
            began.set()
            await suspend(lambda _: None)
        finally:
            closed.set()
            raise ValueError("fails at its end")

    listening.driven.begin(call, wait_and_fail)
    assert began.wait(PATIENCE_SECONDS)
    assert not closed.is_set()
    sent.cancel()
    assert closed.wait(PATIENCE_SECONDS)
    assert listening.driven.wait_for_end(call) is grpc.StatusCode.CANCELLED
    assert answered(listening)


def test_callbacks_run_in_order_on_the_transports_thread(listening: Listening) -> None:
    """One of that thread itself runs at once, and one that fails does not stop the others."""
    sent, call = listening.call()
    ran: list[tuple[object, str]] = []

    def note(name: object) -> None:
        ran.append((name, threading.current_thread().name))

    def outer() -> None:
        call.post(partial(note, "inner"))
        note("outer")

    for number in range(100):
        call.post(partial(note, number))
    call.post(lambda: 1 // 0)
    call.post(outer)
    reply(call)
    assert sent.result() == REPLY
    assert ran == [(name, "calls") for name in (*range(100), "inner", "outer")]


def test_a_callback_of_a_call_that_has_ended_delays_no_other(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_queue, "IDLE_SECONDS", 4 * PATIENCE_SECONDS)
    sent, ended = listening.call()
    reply(ended)
    assert sent.result() == REPLY
    assert listening.driven.wait_for_end(ended) is grpc.StatusCode.OK
    sent, call = listening.call()
    until(lambda: time.monotonic() - listening.transport.now > 0.2)  # the thread sleeps
    ended.task.wake()
    reply(call)
    assert sent.result(PATIENCE_SECONDS) == REPLY
    monkeypatch.undo()
    assert answered(listening)


def test_a_method_name_that_is_not_utf8_does_no_harm(listening: Listening) -> None:
    method: Any = listening.channel.unary_unary(METHOD)
    method._method = b"/\xff\xfe/x"  # the library would refuse to send it
    hostile = method.future(b"", timeout=PATIENCE_SECONDS)
    call = listening.driven.next_call()
    call.post(lambda: call.finish(grpc.StatusCode.UNIMPLEMENTED))
    assert hostile.code() is grpc.StatusCode.UNIMPLEMENTED
    assert answered(listening)


def test_the_second_message_follows_a_first_that_announced_it() -> None:
    """The second is sent once the first was, as every stream does it."""
    listening = Listening()
    method: Any = listening.channel.unary_stream(METHOD)
    answers = method(b"", timeout=PATIENCE_SECONDS)
    call = listening.driven.next_call()
    assert listening.driven.send(call, b"first", more=True)
    assert listening.driven.send(call, b"second")
    call.post(lambda: call.finish(grpc.StatusCode.OK))
    assert list(answers) == [b"first", b"second"]
    listening.channel.close()
    listening.transport.stop(0, no_work)


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition."""
    deadline, pause = time.monotonic() + PATIENCE_SECONDS, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.02)


@both_kinds
def test_an_idle_thread_turns_and_a_stuck_one_does_not(kind: TransportKind) -> None:
    transport = create_transport(kind, {}, max_calls=8)
    entered, proceed = threading.Event(), threading.Event()

    async def block(call: Call) -> None:
        entered.set()
        proceed.wait(PATIENCE_SECONDS)
        call.finish(grpc.StatusCode.UNIMPLEMENTED)

    port = transport.listen(f"{HOST}:0")
    transport.start(block, no_work)
    started = transport.now
    until(lambda: transport.now > started + 0.3)
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        method: Any = channel.unary_unary(METHOD)
        call = method.future(b"", timeout=PATIENCE_SECONDS)
        assert entered.wait(PATIENCE_SECONDS)
        until(lambda: time.monotonic() - transport.now > 0.6)
        proceed.set()
        assert call.code() is grpc.StatusCode.UNIMPLEMENTED
        until(lambda: time.monotonic() - transport.now < 0.3)
    transport.stop(0, no_work)


@both_kinds
def test_a_port_is_in_use_until_the_transport_stops_also_without_a_start(kind: TransportKind) -> None:
    def created() -> Transport:
        return create_transport(kind, {"grpc.so_reuseport": 0}, max_calls=1)

    first, second = created(), created()
    port = first.listen(f"{HOST}:0")
    with pytest.raises(RuntimeError):
        second.listen(f"{HOST}:{port}")
    second.stop(0, no_work)
    for _ in range(2):
        first.stop(0, no_work)
    third = created()
    assert third.listen(f"{HOST}:{port}") == port
    third.stop(0, no_work)


def test_the_threaded_server_does_not_load_the_adapter_on_the_internal_api() -> None:
    """It works with a grpcio that has another one: only one file depends on it."""
    code = """if True:
        import sys
        import attention_serving.server.grpc_server
        from attention_serving.server.transport import TransportKind, create_transport
        transport = create_transport(TransportKind.THREADED, {}, max_calls=1)
        assert transport.listen("127.0.0.1:0")
        transport.stop(0, list)
        print("attention_serving.server.transport.completion_queue" in sys.modules)
    """
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]
    internal = [path for path in (ROOT / "server").rglob("*.py") if "grpc._" in path.read_text()]
    assert internal == [ROOT / "server/transport/completion_queue.py"]


def reply(call: Call) -> None:
    call.post(lambda: call.reply(REPLY))


def test_a_call_that_receives_no_more_ends_its_wait_for_a_message(listening: Listening) -> None:
    names: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    stream, call = listening.stream(iter(names.get, b"end"))
    names.put(b"first")
    assert listening.driven.receive(call) == b"first"
    waiting = listening.driven.begin_to_receive(call)
    on_thread(call, call.stop_receiving)
    assert waiting.result(PATIENCE_SECONDS) is None
    names.put(b"late")
    assert listening.driven.receive(call) is None
    call.post(lambda: call.finish(grpc.StatusCode.OK))
    assert list(stream) == []
    names.put(b"end")


def test_what_a_call_awaited_does_nothing_once_it_has_ended(listening: Listening) -> None:
    ran: list[str] = []
    sent, call = listening.call()

    async def wait() -> None:
        await suspend(lambda _: None)
        ran.append("late")

    listening.driven.begin(call, wait)
    reply(call)
    assert sent.result() == REPLY
    assert listening.driven.wait_for_end(call) is grpc.StatusCode.OK
    call.task.wake()
    assert answered(listening)
    assert not ran
