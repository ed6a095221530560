"""The portable transport: calls through `grpc.server`, with grpcio's public API only.

`grpc.server` needs a thread for each open call, which sends that call's messages, and a second one while
the call waits for a message. Both hand over to an asyncio event loop on a thread of its own, the
transport's thread. Batches run on the engine's threads: `run_inline` is never called.

`grpc.aio` is public as well, but its server ends when a caller sends a method name that is not UTF-8.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import grpc

from attention_serving.server.coroutines import Callback, Task, suspend
from attention_serving.server.transport.call import (
    OK,
    SWEEP_SECONDS,
    Call,
    Metadata,
    OpenCalls,
    deadline_after,
)
from attention_serving.server.transport.call import Serve as ServeCall
from attention_serving.server.transport.connections import Address, listening_address, stop_listening
from attention_serving.server.transport.drain import Drain

log = logging.getLogger(__name__)

# Open calls beyond `max_calls`, such as those of health watchers. More are refused with RESOURCE_EXHAUSTED.
SPARE_CALLS = 512
# How long `grpc.server` may take for what it does at once unless something is wrong.
PATIENCE_SECONDS = 1.0


Serve: TypeAlias = Callable[[str, Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


class _Message(NamedTuple):
    content: bytes
    then: Callback


class _Status(NamedTuple):
    code: grpc.StatusCode
    details: str
    trailing: Metadata


class CallsThread:
    """The transport's thread: an asyncio event loop that runs callbacks."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_log_failure)
        self._thread = threading.Thread(target=self._loop.run_forever, name="calls", daemon=True)
        self._turned_at = time.monotonic()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.get_ident() == self._thread.ident

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def post(self, callback: Callback) -> None:
        """Runs a callback on this thread. For any thread. The callback is dropped after `stop`."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    def turned_at(self) -> float:
        """See `Transport`. The answer is that of the last call, for which it asks the thread anew."""
        self.post(self._turn)
        return self._turned_at

    def _turn(self) -> None:
        self._turned_at = time.monotonic()

    def call_at(self, moment: float, callback: Callback) -> Callback:
        """Runs a callback at a moment on `time.monotonic`'s clock; returns what cancels it."""
        return self._loop.call_at(moment, callback).cancel


class ThreadedCall(Call):
    """A `Call` of `grpc.server`."""

    def __init__(
        self,
        method: str,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
        thread: CallsThread,
        receivers: ThreadPoolExecutor,
        calls: OpenCalls,
    ) -> None:
        super().__init__(method, calls)
        remaining: float | None = context.time_remaining()
        self.deadline = math.inf if remaining is None else deadline_after(remaining)
        self.metadata: Metadata = tuple((key, value) for key, value in context.invocation_metadata())
        self._requests = requests
        self._context = context
        self._thread = thread
        self._receivers = receivers
        # What the call's own thread is to send; None once the call has ended without a status of ours.
        self._outgoing: SimpleQueue[_Message | _Status | None] = SimpleQueue()

    @property
    def peer(self) -> str:
        """See `Call`."""
        found: str = self._context.peer()
        return found

    def _authentication(self) -> Mapping[str, Sequence[bytes]]:
        found: Any = self._context.auth_context()  # the stubs lack that a property has several values
        return dict(found)

    def call_at(self, moment: float, callback: Callback) -> Callback:
        """See `Call`."""
        return self._thread.call_at(moment, callback)

    def post(self, callback: Callback) -> None:
        """See `Call`."""
        if self._thread.is_current:
            callback()
        else:
            self._thread.post(callback)

    def _receive(self, _task: Task) -> None:
        self._receivers.submit(self._wait_for_message)

    def _wait_for_message(self) -> None:
        """Waits for a message, on a thread of the receivers."""
        try:
            message = next(self._requests, None)
        except Exception:  # the call was cancelled
            message = None
        self._thread.post(partial(self._received, message))

    async def _send(self, message: bytes, *, more: bool) -> bool:  # noqa: ARG002
        """See `Call`. `more` has no effect."""
        await suspend(lambda task: self._outgoing.put(_Message(message, task.resume)))
        return True

    def reply(self, message: bytes) -> None:
        """See `Call`."""
        if self.ended_with is None:
            self._outgoing.put(_Message(message, _nothing))
            self.finish(OK)

    def finish(
        self, code: grpc.StatusCode, details: str = "", trailing: Metadata = (), *, reason: str = ""
    ) -> None:
        """See `Call`."""
        if self.ended_with is None:
            self._outgoing.put(_Status(code, details, self._trailing(code, trailing)))
            self._hand_over(code, reason)

    def abort(self) -> None:
        """See `Call`."""
        self._context.cancel()

    def messages(self) -> Iterator[bytes]:
        """What `grpc.server` is to send, and then the status. Runs on the call's own thread."""
        while (outgoing := self._outgoing.get()) is not None:
            if isinstance(outgoing, _Status):
                self._context.set_code(outgoing.code)
                self._context.set_details(outgoing.details)
                self._context.set_trailing_metadata(outgoing.trailing)
                return
            yield outgoing.content
            self._thread.post(outgoing.then)

    def closed(self) -> None:
        """`grpc.server` is done with the call: its status was sent, or it was cancelled. For any thread."""
        self._outgoing.put(None)
        self._thread.post(self._end)


class ThreadedTransport:
    """A `Transport` on `grpc.server`."""

    def __init__(self, options: Mapping[str, int], max_calls: int, send_timeout_seconds: float = 0) -> None:
        """Creates the transport.

        Args:
            options: Channel arguments of gRPC's core.
            max_calls: Number of calls that are held at a time, health and reflection excepted.
            send_timeout_seconds: How long what is sent may wait for the caller to read it. 0 sets no limit.
        """
        self._thread = CallsThread()
        self._calls = OpenCalls(send_timeout_seconds)
        self.addresses: list[Address] = []
        most = max_calls + SPARE_CALLS
        self._senders = ThreadPoolExecutor(most, thread_name_prefix="call")
        self._receivers = ThreadPoolExecutor(most, thread_name_prefix="receive")
        self._serve_call: ServeCall = _refuse
        self._started = self._stopped = False
        self._server = grpc.server(
            self._senders,
            handlers=[_EveryMethod(self._serve)],
            options=list(options.items()),
            maximum_concurrent_rpcs=most,
        )

    def listen(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """See `Transport`."""
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        self.addresses.append(listening_address(address, port))
        return port

    def start(self, serve: ServeCall, run_inline: Callable[[], bool]) -> None:  # noqa: ARG002
        """See `Transport`. `run_inline` is never called."""
        self._serve_call = serve
        self._start()

    def _start(self) -> None:
        self._started = True
        self._thread.start()
        self._thread.post(self._sweep)
        self._server.start()

    def _sweep(self) -> None:
        now = time.monotonic()
        self._calls.sweep(now)
        self._thread.call_at(now + SWEEP_SECONDS, self._sweep)

    def turned_at(self) -> float:
        """See `Transport`."""
        return self._thread.turned_at()

    def stop(self, grace: float, refuse: Callback) -> None:
        """See `Transport`."""
        if self._stopped:
            return
        self._stopped = True
        if not self._started:  # `grpc.server` closes a port only after it was started
            stop_listening(self.addresses)
            self._start()
        drain = Drain(self.addresses, self._calls, self._thread.call_at, grace)
        self._thread.post(partial(drain.begin, refuse))
        drain.finished.wait(drain.longest_seconds + PATIENCE_SECONDS)
        self._server.stop(PATIENCE_SECONDS).wait()
        self._senders.shutdown()
        self._receivers.shutdown()
        self._thread.stop()

    def _serve(
        self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Hands a new call to the transport's thread. Runs on the call's own thread until the call ends."""
        call = ThreadedCall(method, requests, context, self._thread, self._receivers, self._calls)
        self._thread.post(partial(self._begin, call))
        if not context.add_callback(call.closed):
            call.closed()
        yield from call.messages()

    def _begin(self, call: ThreadedCall) -> None:
        self._calls.begin(call, self._serve_call(call))


class _EveryMethod(grpc.GenericRpcHandler):
    """Handles the calls of every method alike: which methods exist is decided above the transport."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """A handler of messages as bytes, in both directions."""
        return grpc.stream_stream_rpc_method_handler(partial(self._serve, handler_call_details.method))


def _log_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs a callback that failed: the failure of one call must not affect the others."""
    log.error("call failed", exc_info=context.get("exception"))


def _nothing() -> None:
    """The callback of a message that nothing follows."""


async def _refuse(call: Call) -> None:
    call.finish(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
