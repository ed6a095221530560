"""The fast transport: calls as gRPC's core delivers them. The only file that uses grpcio's internal API.

One thread takes every event of every call from one completion queue, as an asynchronous server in C++ does. A
second one reads and writes sockets while the first is busy; it does not need the interpreter's lock for that.
grpcio's public servers use the same core, but hand each call from thread to thread or through several
asyncio tasks, and answer a third of the calls per second: docs/performance.md has the figures.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not in the stubs

from attention_serving.server.coroutines import Callback, suspend
from attention_serving.server.transport.call import (
    CORE_TIMEOUT_SECONDS,
    OK,
    SLOW_READER_MESSAGE,
    SWEEP_SECONDS,
    Call,
    CallHandler,
    Metadata,
    Transport,
    deadline_after,
)
from attention_serving.server.transport.drain import drain, listening_address, stop_listening

log = logging.getLogger(__name__)

# Number of calls that are requested from the core in advance.
ACCEPT_AHEAD = 32
# Number of events handled in a row before other work is done, even if more events are ready.
EVENTS_PER_TURN = 128
# Calls with more bytes of metadata are served without it. The sizes of so few entries are not added up.
MAX_METADATA_BYTES, UNCHECKED_METADATA_ENTRIES = 1 << 15, 8
NO_FLAGS = 0
WITHOUT_XDS = False
# A deadline on the clock of `time.time` that makes a poll return at once.
AT_ONCE = 0.0
# How long the thread waits for an event at most. Without an open call, nothing else can wake it.
IDLE_SECONDS = 0.05
# Calls older than one to two times this many seconds get a close notification: by then most are answered.
WATCH_AFTER_SECONDS = 0.01


class CompletionQueueCall(Call):
    """A `Call` of gRPC's core."""

    transport: "CompletionQueueTransport"
    _sent_initial_metadata = _watches_end = False
    _receiving: Any = None

    def __init__(self, event: Any, transport: "CompletionQueueTransport") -> None:
        details, metadata = event.call_details, event.invocation_metadata
        self.method = details.method.decode("utf-8", "replace")
        self.deadline = deadline_after(details.deadline - time.time())
        self.metadata = _limit_metadata(metadata) if len(metadata) > UNCHECKED_METADATA_ENTRIES else metadata
        self.transport = transport
        self._call = event.call

    @property
    def peer(self) -> str:
        """See `Call`."""
        return _text(self._call.peer())

    def authentication(self) -> Mapping[str, Sequence[bytes]]:
        """See `Call`."""
        return {_text(name): values for name, values in cygrpc.auth_context(self._call).items()}

    def watch_end(self) -> None:
        """Has the core report the end of the call, unless it does so already."""
        if not self._watches_end:
            self._watches_end = True
            self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(NO_FLAGS),), self._end)

    def post(self, callback: Callback) -> None:
        """See `Call`."""
        transport = self.transport
        if threading.get_ident() == transport.thread:
            callback()
            return
        transport.post(callback)
        if self.status_code is None and not transport.wakeup_pending:
            transport.wakeup_pending = True
            try:  # a batch of no operations has no effect except that its event wakes the transport's thread
                self._call.start_server_batch((), transport.run_posted)
            except Exception:  # the thread looks by itself within IDLE_SECONDS
                transport.wakeup_pending = False
                log.exception("the transport's thread was not woken")

    def _receive(self) -> None:
        self._receiving = cygrpc.ReceiveMessageOperation(NO_FLAGS)
        self._call.start_server_batch((self._receiving,), self._message_received)

    def _message_received(self, _event: Any) -> None:
        receiving, self._receiving = self._receiving, None
        self._received(receiving.message())

    async def _send(self, message: bytes, *, more: bool) -> None:
        # The hint would keep back the initial metadata too. Its batch completes once it is written: the next
        # message, which is sent upon that, would never follow.
        flags = cygrpc.WriteFlag.buffer_hint if more and self._sent_initial_metadata else NO_FLAGS
        operations: tuple[Any, ...] = (cygrpc.SendMessageOperation(message, flags),)
        if not self._sent_initial_metadata:
            self._sent_initial_metadata = True
            operations = (cygrpc.SendInitialMetadataOperation(None, NO_FLAGS), *operations)
        await suspend(lambda task: self._call.start_server_batch(operations, task.resume))

    def abort(self) -> None:
        """See `Call`."""
        self._call.cancel(grpc.StatusCode.UNAVAILABLE.value[0], SLOW_READER_MESSAGE)

    def _send_status(
        self, code: grpc.StatusCode, details: str, trailing: Metadata, message: bytes | None
    ) -> None:
        operations = []
        if not self._sent_initial_metadata:
            self._sent_initial_metadata = True
            operations.append(cygrpc.SendInitialMetadataOperation(None, NO_FLAGS))
        if message is not None:
            operations.append(cygrpc.SendMessageOperation(message, NO_FLAGS))
        number, text = 0 if code is OK else code.value[0], details.encode(errors="replace")
        operations.append(cygrpc.SendStatusFromServerOperation(trailing, number, text, NO_FLAGS))
        ended: Callable[[Any], object] = _ignore
        if not self._watches_end:  # a call that was answered soon: one batch and one event for both
            self._watches_end, ended = True, self._end
            operations.append(cygrpc.ReceiveCloseOnServerOperation(NO_FLAGS))
        self._call.start_server_batch(operations, ended)


class CompletionQueueTransport(Transport):
    """A `Transport` on a completion queue. Its thread also runs short batches inline.

    Callbacks of other threads wait until this one is woken: if several threads answered calls themselves,
    each message would cost them the interpreter's lock.

    Attributes:
        thread: The identifier of the transport's thread.
        wakeup_pending: Whether an event is on its way for the callbacks that were posted.
    """

    def __init__(self, options: Mapping[str, int], send_timeout_seconds: float = 0) -> None:
        """Creates the transport.

        Args:
            options: Channel arguments of gRPC's core.
            send_timeout_seconds: How long what is sent may wait for the caller to read it. 0 sets no limit.
        """
        super().__init__(send_timeout_seconds)
        self.thread = 0
        self.wakeup_pending = False
        self._posted: deque[Callback] = deque()
        # Calls whose end is not watched yet: those since the last look at them, and those before.
        self._new: list[CompletionQueueCall] = []
        self._older: list[CompletionQueueCall] = []
        self._watched_at = self._swept_at = 0.0
        self._run_inline: Callable[[], bool] = bool  # nothing to do
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server([(name.encode(), value) for name, value in options.items()], WITHOUT_XDS)
        # No event arrives on this queue. Whoever polls it does what the sockets of the server need.
        self._socket_queue = cygrpc.CompletionQueue()
        for queue in (self._queue, self._socket_queue):
            self._server.register_completion_queue(queue)
        self._socket_thread = threading.Thread(target=self._poll_sockets, name="sockets", daemon=True)
        self._thread = threading.Thread(target=self._run, name="calls", daemon=True)
        self._ended = threading.Event()
        self._is_shut_down = False  # the same, for the loop

    def listen(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """See `Transport`."""
        core_credentials: Any = credentials and credentials._credentials  # type: ignore[attr-defined]
        port: int = self._server.add_http2_port(address.encode(), core_credentials)
        if not port:
            raise RuntimeError("the address is in use or does not belong to this machine")
        self.addresses.append(listening_address(address, port))
        return port

    def start(self, handler: CallHandler, run_inline: Callable[[], bool]) -> None:
        """See `Transport`. `run_inline` is called whenever no event is ready."""
        self.handler, self._run_inline = handler, run_inline
        self._server.start()
        for _ in range(ACCEPT_AHEAD):
            self._server.request_call(self._queue, self._queue, self._called)
        self._socket_thread.start()
        self._thread.start()

    def stop(self, grace: float, refuse: Callback) -> None:
        """See `Transport`."""
        if not self._ended.is_set():
            if not self._thread.ident:  # the core aborts the process if a bound server is destroyed unstarted
                stop_listening(self.addresses)
                self._server.start()
                self._socket_thread.start()
                self._thread.start()
            drain(self, grace, refuse)
            self._server.shutdown(self._queue, self._shut_down)
        # Where the connections could not be closed, the core cancels what is left on them.
        if not self._ended.wait(CORE_TIMEOUT_SECONDS):
            self._server.cancel_all_calls()
        self._thread.join()
        self._socket_queue.shutdown()
        self._socket_thread.join()
        self._server.destroy()

    def post(self, callback: Callback) -> None:
        """See `Transport`. The thread is not woken."""
        self._posted.append(callback)

    def run_posted(self, _event: object = None) -> None:
        """Calls back what was posted until now."""
        self.wakeup_pending = False  # first: what is posted from now on wakes the thread again
        for _ in range(len(self._posted)):
            try:
                self._posted.popleft()()
            except Exception:  # the failure of one call must not affect the others
                log.exception("call failed")

    def _shut_down(self, _event: Any) -> None:
        self._is_shut_down = True
        self._ended.set()

    def _called(self, event: Any) -> None:
        if event.call is None or not event.success:  # the server is stopping
            return
        try:  # noqa: SIM105 - three calls less for each call of a client
            self._server.request_call(self._queue, self._queue, self._called)
        except ValueError:  # the server began to stop at this moment
            pass
        call = CompletionQueueCall(event, self)
        self._new.append(call)
        call.start()

    def _run(self) -> None:
        self.thread = threading.get_ident()
        event_count = 0
        while not self._is_shut_down:
            event = self._queue.poll(AT_ONCE if event_count else time.time() + IDLE_SECONDS)
            ready = event.completion_type != cygrpc.CompletionType.queue_timeout
            if ready:
                event_count += 1
                try:
                    event.tag(event)
                except Exception:  # the failure of one call must not affect the others
                    log.exception("call failed")
            del event  # it may hold the last reference to a call, which must go before the next poll
            if not ready or event_count >= EVENTS_PER_TURN:
                event_count = int(self._work())

    def _poll_sockets(self) -> None:
        while not self._is_shut_down:
            self._socket_queue.poll()

    def _work(self) -> bool:
        """Does what is due other than events; returns whether the thread must not sleep."""
        self.now = now = time.monotonic()
        try:
            if self._posted:
                self.run_posted()
            if now - self._watched_at >= WATCH_AFTER_SECONDS:
                self._watch_ends(now)
            return self._run_inline()
        except Exception:  # the thread must survive, or no later call would be answered
            log.exception("the transport's thread failed")
            return False

    def _watch_ends(self, now: float) -> None:
        """Watches the end of calls that are not answered soon, and ends waits that take too long."""
        self._watched_at, older = now, self._older
        self._older, self._new = self._new, []
        for call in older:
            if not call.is_done:
                call.watch_end()
        if now - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = now
            self.sweep(now)


def _limit_metadata(metadata: Metadata) -> Metadata:
    """The metadata of a call, or none if it is one that the core has refused because of their size.

    The core decodes a block of headers before it compares their size with the limit, and hands the call over
    all the same: 12 KB that refer 12,000 times to one header of 4 KB arrive as 16 MB of texts.
    """
    size = sum(len(key) + len(value) for key, value in metadata)
    return () if size > MAX_METADATA_BYTES else metadata


def _ignore(_event: Any) -> None:
    """The end of a batch that another event follows."""


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode("utf-8", "replace")
