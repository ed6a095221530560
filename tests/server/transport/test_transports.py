"""Calls as gRPC's core brings them. `tests/server/api/test_both_transports.py` shows the other adapter."""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, get_args

import grpc
import pytest

from attention_serving.server.coroutines import Wait, suspend
from attention_serving.server.settings import TransportKind
from attention_serving.server.transport import completion_queue
from attention_serving.server.transport.call import Call, Transport
from attention_serving.server.transport.create import create_transport
from tests.server.seams import PATIENCE_SECONDS, settings_of, wait_until
from tests.support.processes import run_python

METHOD = "/any/Method"
REPLY = b"reply"
HOST = "127.0.0.1"
both_kinds = pytest.mark.parametrize("kind", get_args(TransportKind))
Script = Callable[[Call], Coroutine[Wait, Any, object]]


async def reply(call: Call) -> None:
    call.finish(grpc.StatusCode.OK, message=REPLY)


def no_work() -> bool:
    return False


class Listening:
    """A started transport, each call of which is served by the next script.

    Attributes:
        calls: The calls that are held.
        results: What the scripts returned.
        ended: How calls ended, once the core is done with them.
    """

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[grpc.StatusCode | None] = queue.SimpleQueue()
        self._scripts: deque[Script] = deque()
        self.transport = create_transport(settings_of(message_timeout_seconds=0))
        self.port = self.transport.listen(f"{HOST}:0")
        self.transport.start(self._serve, no_work)
        self.channel = grpc.insecure_channel(f"{HOST}:{self.port}")

    async def _serve(self, call: Call) -> None:
        try:
            self.results.put(await self._scripts.popleft()(call))
            await suspend(None)
        finally:
            self.ended.put(call.status_code)

    async def _hold(self, call: Call) -> None:
        self.calls.put(call)
        await suspend(None)

    def call(self, script: Script = reply, message: bytes = b"", timeout: float | None = None) -> Any:
        """A unary call, as its caller sees it."""
        self._scripts.append(script)
        method: Any = self.channel.unary_unary(METHOD)
        return method.future(message, timeout=timeout)

    def hold(self, channel: grpc.Channel | None = None) -> tuple[Any, Call]:
        """A call as its caller sees it and as the transport hands it over, to be ended by the test."""
        self._scripts.append(self._hold)
        method: Any = (channel or self.channel).unary_unary(METHOD)
        return method.future(b"", timeout=PATIENCE_SECONDS), self.calls.get(timeout=PATIENCE_SECONDS)

    def stream(self, script: Script, messages: Iterator[bytes]) -> Any:
        """A stream, as its caller sees it."""
        self._scripts.append(script)
        method: Any = self.channel.stream_stream(METHOD)
        return method(messages, timeout=PATIENCE_SECONDS)

    def result(self) -> Any:
        """What the next script returned."""
        return self.results.get(timeout=PATIENCE_SECONDS)

    def is_answered(self) -> bool:
        """Whether a further call is served as ever."""
        return bool(self.call(timeout=PATIENCE_SECONDS).result() == REPLY)


@pytest.fixture
def listening() -> Iterator[Listening]:
    listening = Listening()
    yield listening
    listening.channel.close()
    listening.transport.stop(0, no_work)


@pytest.mark.parametrize("timeout", [PATIENCE_SECONDS, None], ids=["deadline", "none"])
def test_a_call_has_its_method_deadline_and_message(listening: Listening, timeout: float | None) -> None:
    async def read(call: Call) -> object:
        seconds = call.deadline - time.monotonic()
        found = call.method, await call.message(), await call.message()
        call.finish(grpc.StatusCode.OK, message=REPLY)
        return seconds, found

    assert listening.call(read, b"question", timeout).result(PATIENCE_SECONDS) == REPLY
    seconds, found = listening.result()
    # gRPC rounds a timeout up when it is sent.
    assert seconds == math.inf if timeout is None else 0 < seconds < timeout + 1
    assert found == (METHOD, b"question", None)


def test_the_first_end_of_a_call_reaches_the_caller_with_details_and_metadata(listening: Listening) -> None:
    trailing = (("reason-bin", b"\0\xff"), ("reason", "why"))

    async def finish_often(call: Call) -> object:
        call.finish(grpc.StatusCode.ABORTED, "ä detail", trailing)
        call.finish(grpc.StatusCode.INTERNAL, "second")
        call.finish(grpc.StatusCode.OK, message=REPLY)
        await call.send(REPLY)
        return await call.message()

    sent = listening.call(finish_often)
    assert (sent.code(), sent.details()) == (grpc.StatusCode.ABORTED, "ä detail")
    assert set(trailing) <= {(key, value) for key, value in sent.trailing_metadata()}
    assert listening.result() is None
    assert listening.ended.get(timeout=PATIENCE_SECONDS) is grpc.StatusCode.ABORTED


def test_a_cancelled_call_ends_what_its_coroutine_waits_for(listening: Listening) -> None:
    """Its `finally` blocks run; if one of them fails, other calls are served as before."""
    began, closed = threading.Event(), threading.Event()

    async def wait_and_fail(_call: Call) -> None:
        try:
            began.set()
            await suspend(None)
        finally:
            closed.set()
            raise ValueError("fails at its end")

    sent = listening.call(wait_and_fail)
    assert began.wait(PATIENCE_SECONDS)
    assert not closed.is_set()
    sent.cancel()
    assert closed.wait(PATIENCE_SECONDS)
    assert listening.ended.get(timeout=PATIENCE_SECONDS) is grpc.StatusCode.CANCELLED
    assert listening.is_answered()


def test_callbacks_run_in_order_on_the_transports_thread(listening: Listening) -> None:
    """One of that thread itself runs at once, and one that fails does not stop the others."""
    sent, call = listening.hold()
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
    call.post(lambda: call.finish(grpc.StatusCode.OK, message=REPLY))
    assert sent.result() == REPLY
    assert ran == [(name, "calls") for name in (*range(100), "inner", "outer")]


def test_an_ended_call_is_not_resumed(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    async def reply_and_wait(call: Call) -> None:
        listening.calls.put(call)
        call.finish(grpc.StatusCode.OK, message=REPLY)
        await suspend(None)
        ran.append("late")

    monkeypatch.setattr(completion_queue, "IDLE_SECONDS", 4 * PATIENCE_SECONDS)
    assert listening.call(reply_and_wait).result() == REPLY
    ended = listening.calls.get(timeout=PATIENCE_SECONDS)
    assert listening.ended.get(timeout=PATIENCE_SECONDS) is grpc.StatusCode.OK
    sent, call = listening.hold()
    wait_until(lambda: time.monotonic() - listening.transport.now > 0.2)  # the thread sleeps
    ended.wake()
    call.post(lambda: call.finish(grpc.StatusCode.OK, message=REPLY))
    assert sent.result(PATIENCE_SECONDS) == REPLY
    monkeypatch.undo()
    assert listening.is_answered()
    assert not ran


def test_a_method_name_that_is_not_utf8_does_no_harm(listening: Listening) -> None:
    async def refuse(call: Call) -> None:
        call.finish(grpc.StatusCode.UNIMPLEMENTED)

    listening._scripts.append(refuse)
    method: Any = listening.channel.unary_unary(METHOD)
    method._method = b"/\xff\xfe/x"  # the library would refuse to send it
    assert method.future(b"", timeout=PATIENCE_SECONDS).code() is grpc.StatusCode.UNIMPLEMENTED
    assert listening.is_answered()


def test_the_second_message_follows_a_first_that_announced_it(listening: Listening) -> None:
    """The second is sent once the first was, as every stream does it."""

    async def send_two(call: Call) -> None:
        await call.send(b"first", more=True)
        await call.send(b"second")
        call.finish(grpc.StatusCode.OK)

    assert list(listening.stream(send_two, iter([b""]))) == [b"first", b"second"]


def test_a_call_that_receives_no_more_ends_its_wait_for_a_message(listening: Listening) -> None:
    async def read(call: Call) -> object:
        first = await call.message()
        listening.calls.put(call)
        found = first, await call.message(), await call.message()
        call.finish(grpc.StatusCode.OK)
        return found

    messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    messages.put(b"first")
    stream = listening.stream(read, iter(messages.get, None))
    call = listening.calls.get(timeout=PATIENCE_SECONDS)
    call.post(call.stop_receiving)
    messages.put(b"late")
    assert list(stream) == []
    assert listening.result() == (b"first", None, None)
    messages.put(None)


@both_kinds
def test_an_idle_thread_turns_and_a_stuck_one_does_not(kind: TransportKind) -> None:
    transport = create_transport(settings_of(transport=kind))
    entered, proceed = threading.Event(), threading.Event()

    async def block(call: Call) -> None:
        entered.set()
        proceed.wait(PATIENCE_SECONDS)
        call.finish(grpc.StatusCode.UNIMPLEMENTED)

    port = transport.listen(f"{HOST}:0")
    transport.start(block, no_work)
    started = transport.now
    wait_until(lambda: transport.now > started + 0.3)
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        method: Any = channel.unary_unary(METHOD)
        call = method.future(b"", timeout=PATIENCE_SECONDS)
        assert entered.wait(PATIENCE_SECONDS)
        wait_until(lambda: time.monotonic() - transport.now > 0.6)
        proceed.set()
        assert call.code() is grpc.StatusCode.UNIMPLEMENTED
        wait_until(lambda: time.monotonic() - transport.now < 0.3)
    transport.stop(0, no_work)


@both_kinds
def test_a_port_is_in_use_until_the_transport_stops_also_without_a_start(kind: TransportKind) -> None:
    def created() -> Transport:
        return create_transport(settings_of(transport=kind))

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
    """It works with a grpcio that has another one: tests/test_structure.py confines the dependency."""
    code = """if True:
        import sys
        import attention_serving.server.process.grpc_server
        from attention_serving.server.settings import Settings
        from attention_serving.server.transport.create import create_transport
        transport = create_transport(Settings(model_repository="unused", transport="threaded"))
        assert transport.listen("127.0.0.1:0")
        transport.stop(0, list)
        print("attention_serving.server.transport.completion_queue" in sys.modules)
    """
    assert run_python("-c", code).stdout.split() == ["False"]


UNPOLLED = """
import select, socket, threading
import attention_serving.server
from grpc._cython import cygrpc

queue, server = cygrpc.CompletionQueue(), cygrpc.Server([], False)
server.register_completion_queue(queue)
port = server.add_http2_port(b"127.0.0.1:0", None)
server.start()
client = socket.create_connection(("127.0.0.1", port))
client.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
print(select.select([client], [], [], 0.5)[0] == [])
threading.Thread(target=queue.poll, daemon=True).start()
print(select.select([client], [], [], 30)[0] == [client], flush=True)
__import__("os")._exit(0)
"""


def test_the_core_leaves_the_sockets_to_the_threads_that_poll() -> None:
    """Holds the switch that `server/__init__.py` sets: a later core may not know it."""
    assert run_python("-c", UNPOLLED).stdout.split() == ["True", "True"]
