"""What every transport provides, whichever adapter it is."""

import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def no_work() -> bool:
    return False


class Listening:
    """A started transport, whose calls the test answers."""

    def __init__(self, kind: TransportKind, send_timeout: float = 0, **options: int) -> None:
        self.driven = Driven()
        options = {"grpc.so_reuseport": 0, **options}
        self.transport = create_transport(kind, options, max_calls=8, send_timeout_seconds=send_timeout)
        self.port = self.transport.listen(f"{HOST}:0")
        self.transport.start(self.driven.serve, no_work)
        self.channel = grpc.insecure_channel(f"{HOST}:{self.port}")

    def call(self, message: bytes = b"", timeout: float = PATIENCE_SECONDS) -> tuple[Any, Call]:
        """A unary call, as its caller sees it and as the transport hands it over."""
        method: Any = self.channel.unary_unary(METHOD)
        sent = method.future(message, timeout=timeout)
        return sent, self.driven.next_call()

    def stream(self, messages: Iterator[bytes]) -> tuple[Any, Call]:
        """The same of a stream."""
        method: Any = self.channel.stream_stream(METHOD)
        return method(messages, timeout=PATIENCE_SECONDS), self.driven.next_call()

    def close(self) -> None:
        self.channel.close()
        self.transport.stop(0, no_work)


@pytest.fixture(params=TransportKind, ids=str)
def kind(request: pytest.FixtureRequest) -> TransportKind:
    found: TransportKind = request.param
    return found


@pytest.fixture
def listening(kind: TransportKind) -> Iterator[Listening]:
    listening = Listening(kind)
    yield listening
    listening.close()


def reply(call: Call) -> None:
    call.post(lambda: call.reply(REPLY))


def test_a_call_has_its_method_deadline_and_message(listening: Listening) -> None:
    sent, call = listening.call(b"question")
    assert call.method == METHOD
    # gRPC rounds a timeout up when it is sent.
    assert 0 < call.deadline - time.monotonic() < PATIENCE_SECONDS + 1
    assert listening.driven.receive(call) == b"question"
    assert listening.driven.receive(call) is None
    reply(call)
    assert sent.result() == REPLY


def test_a_call_without_a_deadline_has_an_infinite_one(listening: Listening) -> None:
    method: Any = listening.channel.unary_unary(METHOD)
    sent = method.future(b"")
    call = listening.driven.next_call()
    assert call.deadline == math.inf
    reply(call)
    assert sent.result(PATIENCE_SECONDS) == REPLY


def test_messages_of_a_stream_are_received_and_sent_in_order(listening: Listening) -> None:
    names = [str(number).encode() for number in range(20)]
    stream, call = listening.stream(iter(names))
    assert [listening.driven.receive(call) for _ in names] == names
    assert listening.driven.receive(call) is None
    for name in names:
        assert listening.driven.send(call, name, more=True)
    call.post(lambda: call.finish(grpc.StatusCode.OK))
    assert list(stream) == names


def test_a_status_reaches_the_caller_with_details_and_trailing_metadata(listening: Listening) -> None:
    sent, call = listening.call()
    trailing = (("reason-bin", b"\0\xff"), ("reason", "why"))
    call.post(lambda: call.finish(grpc.StatusCode.ABORTED, "ä detail", trailing))
    assert (sent.code(), sent.details()) == (grpc.StatusCode.ABORTED, "ä detail")
    assert set(trailing) <= {(key, value) for key, value in sent.trailing_metadata()}


def test_only_the_first_end_of_a_call_counts(listening: Listening) -> None:
    sent, call = listening.call()

    async def finish_often() -> bool:
        call.finish(grpc.StatusCode.ABORTED, "first")
        call.finish(grpc.StatusCode.INTERNAL, "second")
        call.reply(REPLY)
        return await call.send(REPLY)

    assert not listening.driven.begin(call, finish_often).result(PATIENCE_SECONDS)
    assert (sent.code(), sent.details()) == (grpc.StatusCode.ABORTED, "first")
    assert listening.driven.wait_for_end(call) is grpc.StatusCode.ABORTED


def test_a_cancelled_call_ends(listening: Listening) -> None:
    sent, call = listening.call()
    sent.cancel()
    assert listening.driven.wait_for_end(call) is grpc.StatusCode.CANCELLED


def test_a_call_ends_at_its_deadline(listening: Listening) -> None:
    sent, call = listening.call()
    reply(call)
    assert sent.result() == REPLY  # the connection is established before the time is short
    sent, call = listening.call(timeout=2)
    assert listening.driven.wait_for_end(call) is grpc.StatusCode.CANCELLED
    assert sent.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_the_core_is_done_with_a_call_once_its_reply_was_sent(listening: Listening) -> None:
    sent, call = listening.call()
    order: list[str] = []

    async def end() -> None:
        try:
            call.reply(REPLY)
            order.append("replied")
            await call.done()
        finally:
            order.append("done")

    listening.driven.begin(call, end)
    assert sent.result() == REPLY
    assert listening.driven.wait_for_end(call) is grpc.StatusCode.OK
    assert (order, call.is_done) == (["replied", "done"], True)


def test_a_call_that_is_cancelled_ends_what_its_coroutine_waits_for(listening: Listening) -> None:
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
    sent, call = listening.call()
    reply(call)
    assert sent.result() == REPLY


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


def test_a_call_that_has_ended_has_no_messages(listening: Listening) -> None:
    sent, call = listening.call(b"question")

    async def finish_and_receive() -> bytes | None:
        call.finish(grpc.StatusCode.ABORTED)
        found: bytes | None = await call.message()
        return found

    assert listening.driven.begin(call, finish_and_receive).result(PATIENCE_SECONDS) is None
    assert sent.code() is grpc.StatusCode.ABORTED


def test_callbacks_of_other_threads_run_in_order_on_the_transports_thread(listening: Listening) -> None:
    sent, call = listening.call()
    ran: list[tuple[int, str]] = []

    def note(number: int) -> None:
        ran.append((number, threading.current_thread().name))

    for number in range(100):
        call.post(partial(note, number))
    reply(call)
    assert sent.result() == REPLY
    assert ran == [(number, "calls") for number in range(100)]


def test_a_callback_of_the_transports_own_thread_runs_at_once(listening: Listening) -> None:
    sent, call = listening.call()
    order: list[str] = []

    def outer() -> None:
        call.post(lambda: order.append("inner"))
        order.append("outer")
        call.reply(REPLY)

    call.post(outer)
    assert sent.result() == REPLY
    assert order == ["inner", "outer"]


def test_a_callback_that_fails_does_not_stop_the_others(listening: Listening) -> None:
    sent, call = listening.call()
    call.post(lambda: 1 // 0)
    reply(call)
    assert sent.result() == REPLY


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
    listening.close()
    assert not ran


def until_asleep(transport: Transport) -> None:
    """Until the transport's thread has not looked for work for a while."""
    deadline, pause = time.monotonic() + PATIENCE_SECONDS, threading.Event()
    while time.monotonic() - transport.now < 0.2:
        assert time.monotonic() < deadline
        pause.wait(0.02)


def test_a_callback_of_a_call_that_has_ended_delays_no_other(
    kind: TransportKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_queue, "IDLE_SECONDS", 4 * PATIENCE_SECONDS)
    listening = Listening(kind)
    sent, ended = listening.call()
    reply(ended)
    assert sent.result() == REPLY
    assert listening.driven.wait_for_end(ended) is grpc.StatusCode.OK
    sent, call = listening.call()
    if kind is TransportKind.COMPLETION_QUEUE:
        until_asleep(listening.transport)
    ended.task.wake()
    reply(call)
    assert sent.result(PATIENCE_SECONDS) == REPLY
    listening.close()


def test_timers_run_in_order_and_can_be_cancelled(listening: Listening) -> None:
    sent, call = listening.call()
    ran: list[str] = []

    def schedule() -> None:
        now = time.monotonic()
        cancel = call.transport.call_at(now + 0.02, partial(ran.append, "cancelled"))
        call.transport.call_at(now + 0.04, lambda: call.reply(REPLY))
        call.transport.call_at(now + 0.03, partial(ran.append, "second"))
        call.transport.call_at(now + 0.01, partial(ran.append, "first"))
        cancel()
        cancel()

    on_thread(call, schedule)
    assert sent.result() == REPLY
    assert ran == ["first", "second"]


@contextmanager
def raw_method(channel: grpc.Channel, name: bytes) -> Iterator[Any]:
    """A method whose name the library would refuse to send."""
    method: Any = channel.unary_unary("/any/Name")
    method._method = name
    yield method


def test_a_method_name_that_is_not_utf8_does_no_harm(listening: Listening) -> None:
    with raw_method(listening.channel, b"/\xff\xfe/x") as method:
        hostile = method.future(b"", timeout=PATIENCE_SECONDS)
        call = listening.driven.next_call()
        call.post(lambda: call.finish(grpc.StatusCode.UNIMPLEMENTED))
        assert hostile.code() is grpc.StatusCode.UNIMPLEMENTED
    sent, call = listening.call()
    reply(call)
    assert sent.result() == REPLY


def test_a_message_beyond_the_limit_is_refused(kind: TransportKind) -> None:
    listening = Listening(kind, **{"grpc.max_receive_message_length": 1000})
    sent, call = listening.call(bytes(1001))
    waiting = listening.driven.begin_to_receive(call)
    assert sent.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    listening.driven.wait_for_end(call)
    assert not waiting.done() or waiting.result() is None
    sent, call = listening.call(bytes(1000))
    assert listening.driven.receive(call) == bytes(1000)
    reply(call)
    assert sent.result() == REPLY
    listening.close()


def test_stopping_waits_for_open_calls_and_cancels_them_after_the_grace(kind: TransportKind) -> None:
    listening = Listening(kind)
    kept, call = listening.call()
    stopping = threading.Thread(target=listening.transport.stop, args=(PATIENCE_SECONDS, no_work))
    stopping.start()
    assert listening.driven.receive(call) == b""
    assert stopping.is_alive()
    reply(call)
    assert kept.result() == REPLY
    stopping.join(PATIENCE_SECONDS)
    assert not stopping.is_alive()

    listening = Listening(kind)
    lost, call = listening.call()
    listening.close()
    assert listening.driven.wait_for_end(call) in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
    assert lost.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}


async def replying(call: Call) -> None:
    call.reply(REPLY)


def test_calls_wait_between_listening_and_the_start(kind: TransportKind) -> None:
    transport = create_transport(kind, {}, max_calls=8)
    with grpc.insecure_channel(f"{HOST}:{transport.listen(f'{HOST}:0')}") as channel:
        method: Any = channel.unary_unary(METHOD)
        sent = method.future(b"", timeout=PATIENCE_SECONDS)
        transport.start(replying, no_work)
        assert sent.result() == REPLY
    transport.stop(0, no_work)


def listen_in_vain(kind: TransportKind, port: int) -> None:
    transport = create_transport(kind, {"grpc.so_reuseport": 0}, max_calls=1)
    with pytest.raises(RuntimeError):
        transport.listen(f"{HOST}:{port}")
    transport.stop(0, no_work)


def bound(kind: TransportKind) -> tuple[Transport, int]:
    transport = create_transport(kind, {"grpc.so_reuseport": 0}, max_calls=1)
    return transport, transport.listen(f"{HOST}:0")


def test_a_port_is_in_use_until_the_transport_stops_also_without_a_start(kind: TransportKind) -> None:
    first, port = bound(kind)
    listen_in_vain(kind, port)
    first.stop(0, no_work)
    first.stop(0, no_work)
    second = create_transport(kind, {"grpc.so_reuseport": 0}, max_calls=1)
    assert second.listen(f"{HOST}:{port}") == port
    second.stop(0, no_work)


def test_the_threaded_server_does_not_load_the_adapter_on_the_internal_api() -> None:
    code = """if True:
        import sys
        from attention_serving.server.transport.options import RpcOptions
        from attention_serving.server.grpc_server import RpcServer
        from attention_serving.server.transport import TransportKind
        options = RpcOptions(host="127.0.0.1", port=0, max_message_bytes=1, max_concurrent_calls=1,
                             max_streams=1, stream_window=1, transport=TransportKind.THREADED)
        server = RpcServer(options, None)
        assert server.bind()
        server.stop(0)
        print("attention_serving.server.transport.completion_queue" in sys.modules)
    """
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]


def test_only_one_file_of_the_server_uses_the_internal_api_of_grpcio() -> None:
    found = [path for path in (ROOT / "server").rglob("*.py") if "grpc._" in path.read_text()]
    assert found == [ROOT / "server/transport/completion_queue.py"]
