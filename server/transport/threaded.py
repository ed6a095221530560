"""The portable transport: calls through `grpc.server`, with grpcio's public API only.

`grpc.server` needs a thread for each open call, which sends that call's messages, and a second one while
the call waits for a message. Both hand callbacks to a thread of its own, the transport's thread. Batches run
on the engine's threads: `run_inline` is never called.

`grpc.aio` is public as well, but its server ends when a caller sends a method name that is not UTF-8.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from attention_serving.server.coroutines import Callback, suspend
from attention_serving.server.transport.call import (
    CORE_TIMEOUT_SECONDS,
    SWEEP_SECONDS,
    Call,
    CallHandler,
    Metadata,
    Transport,
    deadline_after,
)
from attention_serving.server.transport.drain import drain, listening_address, stop_listening

log = logging.getLogger(__name__)

# Open calls beyond `max_calls`, such as those of health watchers. More are refused with RESOURCE_EXHAUSTED.
SPARE_CALLS = 512


class ThreadedCall(Call):
    """A `Call` of `grpc.server`."""

    transport: "ThreadedTransport"

    def __init__(
        self, method: str, requests: Iterator[bytes], context: Any, transport: "ThreadedTransport"
    ) -> None:
        remaining: float | None = context.time_remaining()
        self.method = method
        self.deadline = math.inf if remaining is None else deadline_after(remaining)
        self.metadata = tuple((key, value) for key, value in context.invocation_metadata())
        self.transport, self._requests, self._context = transport, requests, context
        # What the call's own thread is to send, with a callback for after it; None before the status.
        self._outgoing: SimpleQueue[tuple[bytes, Callback] | None] = SimpleQueue()

    @property
    def peer(self) -> str:
        """See `Call`."""
        return str(self._context.peer())

    def authentication(self) -> Mapping[str, Sequence[bytes]]:
        """See `Call`."""
        return dict(self._context.auth_context())

    def post(self, callback: Callback) -> None:
        """See `Call`."""
        if threading.get_ident() == self.transport.thread.ident:
            callback()
        else:
            self.transport.post(callback)

    def _receive(self) -> None:
        self.transport.receivers.submit(self._wait_for_message)

    def _wait_for_message(self) -> None:
        """Waits for a message, on a thread of the receivers."""
        try:
            message = next(self._requests, None)
        except Exception:  # the call was cancelled
            message = None
        self.transport.post(partial(self._received, message))

    async def _send(self, message: bytes, *, more: bool) -> None:  # noqa: ARG002
        """See `Call`. `more` has no effect."""
        await suspend(lambda task: self._outgoing.put((message, task.resume)))

    def _send_status(
        self, code: grpc.StatusCode, details: str, trailing: Metadata, message: bytes | None
    ) -> None:
        self._context.set_code(code)
        self._context.set_details(details)
        self._context.set_trailing_metadata(trailing)
        if message is not None:
            self._outgoing.put((message, bool))
        self._outgoing.put(None)

    def abort(self) -> None:
        """See `Call`."""
        self._context.cancel()

    def messages(self) -> Iterator[bytes]:
        """What `grpc.server` is to send, and then the status. Runs on the call's own thread."""
        while (outgoing := self._outgoing.get()) is not None:
            message, then = outgoing
            yield message
            self.transport.post(then)
            del message, outgoing  # they must not stay alive while the stream is idle

    def closed(self) -> None:
        """`grpc.server` is done with the call: its status was sent, or it was cancelled. For any thread."""
        self._outgoing.put(None)
        self.transport.post(self._end)


class ThreadedTransport(Transport, grpc.GenericRpcHandler):
    """A `Transport` on `grpc.server`. Its thread runs callbacks.

    Attributes:
        thread: The transport's thread.
        receivers: The threads that wait for messages.
    """

    def __init__(self, options: Mapping[str, int], max_calls: int, send_timeout_seconds: float = 0) -> None:
        """Creates the transport.

        Args:
            options: Channel arguments of gRPC's core.
            max_calls: Number of calls that are held at a time, health and reflection excepted.
            send_timeout_seconds: How long what is sent may wait for the caller to read it. 0 sets no limit.
        """
        super().__init__(send_timeout_seconds)
        self._is_stopped = False
        # None ends the thread.
        self._posted: SimpleQueue[Callback | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="calls", daemon=True)
        most = max_calls + SPARE_CALLS
        self._senders = ThreadPoolExecutor(most, thread_name_prefix="call")
        self.receivers = ThreadPoolExecutor(most, thread_name_prefix="receive")
        self._server = grpc.server(
            self._senders, handlers=[self], options=list(options.items()), maximum_concurrent_rpcs=most
        )

    def listen(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """See `Transport`."""
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        self.addresses.append(listening_address(address, port))
        return port

    def start(self, handler: CallHandler, run_inline: Callable[[], bool]) -> None:  # noqa: ARG002
        """See `Transport`. `run_inline` is never called."""
        self.handler = handler
        self.thread.start()
        self._server.start()

    def _run(self) -> None:
        callback: Callback | None = bool  # which does nothing
        while callback is not None:
            try:
                callback()
                if (now := time.monotonic()) >= self.now + SWEEP_SECONDS:
                    self.sweep(now)
            except Exception:  # the failure of one call must not affect the others
                log.exception("call failed")
            callback = bool  # nothing of a call may stay alive while the thread waits
            with suppress(Empty):
                callback = self._posted.get(timeout=SWEEP_SECONDS)

    def stop(self, grace: float, refuse: Callback) -> None:
        """See `Transport`."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if not self.thread.ident:  # `grpc.server` closes a port only after it was started
            stop_listening(self.addresses)
            self.start(_refuse, bool)
        drain(self, grace, refuse)
        self._server.stop(CORE_TIMEOUT_SECONDS).wait()
        self._senders.shutdown()
        self.receivers.shutdown()
        self._posted.put(None)
        self.thread.join()

    def post(self, callback: Callback) -> None:
        """See `Transport`. The callback is dropped after `stop`."""
        self._posted.put(callback)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """The handler of every method: bytes in both directions. `handler` decides which methods exist."""
        return grpc.stream_stream_rpc_method_handler(partial(self._serve, handler_call_details.method))

    def _serve(
        self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Hands a new call to the transport's thread. Runs on the call's own thread until the call ends."""
        call = ThreadedCall(method, requests, context, self)
        self.post(call.start)
        if not context.add_callback(call.closed):
            call.closed()
        yield from call.messages()


async def _refuse(call: Call) -> None:
    call.finish(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
