"""Calls as gRPC's core delivers them: the only file that reaches below grpcio's public interface.

One thread takes every event of every call from one completion queue, in the manner of a C++ asynchronous
server. grpcio's two public servers stand on the same core; they hand each call from thread to thread, or
through several asyncio tasks, and answer a third of the calls per second: docs/performance.md has figures.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not in the stubs

from server.rpc.timers import Timers, after

log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str | bytes], ...]
# Calls that the core may hand over without being asked for each.
ACCEPT_AHEAD = 32
# Events taken before work gets its turn although more are ready.
EVENTS_PER_TURN = 128
NO_FLAGS = 0
WITHOUT_XDS = False
# On the clock of `time.time`: polls that far in the past return at once.
AT_ONCE = 0.0


class Call:
    """One call. Its methods may be called from any thread; callbacks come from the queue's thread.

    Attributes:
        method: Full name, such as `/attention.v1.AttentionService/Attend`.
        deadline: On `time.monotonic`'s clock, in seconds.
        code: What a unary answer ends with; a servicer of a library may set another.
    """

    def __init__(self, event: Any, timers: Timers, errands: "Errands") -> None:
        self.method: str = _text(event.call_details.method)
        self.deadline = after(event.call_details.deadline - time.time())
        self.code = grpc.StatusCode.OK
        self._call = event.call
        self._timers = timers
        self._errands = errands
        self._opened = False
        self._end: grpc.StatusCode | None = None
        self._lock = threading.Lock()
        # What several threads send reaches the core in one order: the opening first, the end last.
        self._sending = threading.Lock()
        self._at_end: list[Callable[[], object]] = []
        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(NO_FLAGS),), self._closed)

    def set_code(self, code: grpc.StatusCode) -> None:
        """As a servicer of a library ends its call, in place of an error."""
        self.code = code

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Calls back once when the call has ended, however it did."""
        with self._lock:
            if self._end is None:
                self._at_end.append(callback)
                return
        callback()

    def at(self, moment: float, callback: Callable[[], object]) -> None:
        """Calls back at a moment, on `time.monotonic`'s clock, unless the call ends before."""
        number = self._timers.add(moment, callback)
        self.add_callback(lambda: self._timers.call_off(number))

    def soon(self, callback: Callable[[], object]) -> None:
        """Calls back on the queue's thread, at once where that is this one, unless the call ends before."""
        if threading.get_ident() == self._errands.thread:
            callback()
        elif self._end is None and self._errands.add(callback):
            # A batch of no operations does nothing but wake the queue's thread.
            self._call.start_server_batch((), self._errands.run)

    @property
    def ended_with(self) -> grpc.StatusCode | None:
        """The status that it ended with; None for a call that goes on."""
        return self._end

    def receive(self, then: Callable[[bytes | None], None]) -> None:
        """Asks for the next message; None where no more come."""
        operation = cygrpc.ReceiveMessageOperation(NO_FLAGS)
        self._call.start_server_batch((operation,), lambda _event: then(operation.message()))

    def send(self, message: bytes, then: Callable[[bool], None], *, more: bool = False) -> None:
        """Sends one message of a stream; does nothing where the call has ended.

        Args:
            message: Its bytes.
            then: Told when the next may follow: False where nobody listens.
            more: Whether the next follows at once, so that both may leave in one write.
        """
        flags = cygrpc.WriteFlag.buffer_hint if more else NO_FLAGS
        with self._sending:
            if self._end is None:
                operations = (*self._opening(), cygrpc.SendMessageOperation(message, flags))
                self._call.start_server_batch(operations, lambda event: then(event.success))

    def reply(self, message: bytes) -> None:
        """Sends the one message of a unary call, and its end."""
        if self._ends_with(self.code):
            self._send_end(cygrpc.SendMessageOperation(message, NO_FLAGS))

    def finish(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        """Ends the call; does nothing where it has ended."""
        if self._ends_with(code):
            self._send_end(details=details, trailing=trailing)

    def _send_end(self, *message: Any, details: str = "", trailing: Metadata = ()) -> None:
        code = (self._end or grpc.StatusCode.UNKNOWN).value[0]
        status = cygrpc.SendStatusFromServerOperation(trailing, code, details.encode(), NO_FLAGS)
        with self._sending:
            self._call.start_server_batch((*self._opening(), *message, status), _nothing)

    def _opening(self) -> tuple[Any, ...]:
        opened, self._opened = self._opened, True
        return () if opened else (cygrpc.SendInitialMetadataOperation(None, NO_FLAGS),)

    def _closed(self, _event: Any) -> None:
        """The core has no more to say: the answer is on its way, or the caller left."""
        self._ends_with(grpc.StatusCode.CANCELLED)

    def _ends_with(self, code: grpc.StatusCode) -> bool:
        """Notes the end, once, and tells those who wait for it; whether this was the first."""
        with self._lock:
            if self._end is not None:
                return False
            self._end = code
            callbacks, self._at_end = self._at_end, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # each of them is told, whatever the others do
                log.exception("callback failed", extra={"method": self.method})
        return True


class Errands:
    """What other threads leave to the queue's thread.

    To answer from several threads at once costs each of them the interpreter's lock with every message.

    Attributes:
        thread: The identifier of the queue's thread.
    """

    def __init__(self) -> None:
        self.thread = 0
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    def add(self, callback: Callable[[], object]) -> bool:
        """Keeps a callback; whether it is the first, so that the thread has to be woken."""
        with self._lock:
            self._callbacks.append(callback)
            return len(self._callbacks) == 1

    def run(self, _event: object) -> None:
        """Calls all of them back."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # one call's failure is not that of the others
                log.exception("call failed")


class CompletionQueueServer:
    """Listens, and hands out calls and turns on a thread of its own, from `start` to `stop`."""

    def __init__(self, options: Mapping[str, int]) -> None:
        """Makes the server.

        Args:
            options: Channel arguments of gRPC's core.
        """
        self._timers = Timers()
        self._errands = Errands()
        self._accept: Callable[[Call], None] = lambda _call: None
        self._turn: Callable[[], bool] = lambda: False
        self._started = False
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server([(name.encode(), value) for name, value in options.items()], WITHOUT_XDS)
        self._server.register_completion_queue(self._queue)
        self._thread = threading.Thread(target=self._serve, name="calls", daemon=True)
        self._ended = threading.Event()

    def listen(self, address: str) -> int:
        """Binds an address and returns its port.

        Raises:
            RuntimeError: The address is taken or is none of this machine's.
        """
        port: int = self._server.add_http2_port(address.encode())
        if not port:
            raise RuntimeError("the address is taken or is none of this machine's")
        return port

    def start(self, accept: Callable[[Call], None], turn: Callable[[], bool]) -> None:
        """Begins to accept calls.

        Args:
            accept: Takes a new call.
            turn: Called when no event is ready: does a piece of work, and says whether there may be more.
        """
        self._accept, self._turn = accept, turn
        self._started = True
        self._server.start()
        for _ in range(ACCEPT_AHEAD):
            self._request_call()
        self._thread.start()

    def stop(self, grace: float) -> None:
        """Accepts no more calls and waits for the last to end; after `grace` seconds cancels those left."""
        if not self._started:  # the core ends only what has begun
            self._server.start()
            self._thread.start()
            self._started = True
        self._server.shutdown(self._queue, lambda _event: self._ended.set())
        if not self._ended.wait(grace):
            self._server.cancel_all_calls()
        self._thread.join()
        self._server.destroy()

    def _request_call(self) -> None:
        self._server.request_call(self._queue, self._queue, self._called)

    def _called(self, event: Any) -> None:
        if event.call is None or not event.success:  # the server is stopping
            return
        self._request_call_again()
        self._accept(Call(event, self._timers, self._errands))

    def _request_call_again(self) -> None:
        try:
            self._request_call()
        except ValueError:  # the server began to stop in this moment
            log.debug("no more calls are asked for")

    def _serve(self) -> None:
        self._errands.thread = threading.get_ident()
        taken = 0
        while not self._ended.is_set():
            event = self._queue.poll(AT_ONCE if taken else self._next_timer())
            ready = event.completion_type != cygrpc.CompletionType.queue_timeout
            if ready:
                taken += 1
                self._handle(event)
            del event  # it may hold the last reference to a call, which must go before the next poll
            if not ready or taken >= EVENTS_PER_TURN:
                taken = 1 if self._work() else 0

    def _handle(self, event: Any) -> None:
        try:
            event.tag(event)
        except Exception:  # one call's failure is not that of the others
            log.exception("call failed")

    def _work(self) -> bool:
        try:
            self._timers.run_due(time.monotonic())
            return self._turn()
        except Exception:  # the calls that follow must not find a server without a thread
            log.exception("turn failed")
            return False

    def _next_timer(self) -> float | None:
        due = self._timers.next_due
        return None if due == math.inf else time.time() + due - time.monotonic()


def _nothing(_event: Any) -> None:
    """The end of a batch after which nothing follows."""


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
