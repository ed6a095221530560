"""A call whose events the test decides: an adapter of `Call`, for orders that no network forces."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from attention_serving.server.api.admission import Admission
from attention_serving.server.api.calls import CallObserver, Calls
from attention_serving.server.api.method import Method
from attention_serving.server.coroutines import Callback, Task, suspend
from attention_serving.server.transport.call import Call, Metadata, Serve, Transport
from attention_serving.server.transport.options import RpcOptions
from tests.server.seams import PATIENCE_SECONDS
from tests.server.seams import Calls as Observed

METHOD = "/tests.Scripted/Method"
UNLIMITED = RpcOptions(
    host="",
    port=0,
    max_message_bytes=0,
    max_concurrent_calls=1000,
    max_streams=1000,
    stream_window=3,
    receive_timeout_seconds=0,
    stream_idle_seconds=0,
)


class ScriptedTransport(Transport):
    """The transport of one call, whose timers run when the test says."""

    def __init__(self, send_timeout_seconds: float) -> None:
        super().__init__(send_timeout_seconds)
        self.timers: dict[Callback, float] = {}

    def listen(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        raise NotImplementedError

    def start(self, serve: Serve, run_inline: Callable[[], bool]) -> None:
        raise NotImplementedError

    def stop(self, grace: float, refuse: Callback) -> None:
        raise NotImplementedError

    def post(self, callback: Callback) -> None:
        raise NotImplementedError

    def call_at(self, moment: float, callback: Callback) -> Callback:
        self.timers[callback] = moment
        return lambda: self.timers.pop(callback, None)


class ScriptedCall(Call):
    """A `Call` on the thread that creates it.

    The test delivers messages, lets sends and the status complete, and lets the caller leave. Callbacks of
    other threads wait until the test runs them.
    """

    peer = ""
    metadata: Metadata = ()
    method = METHOD
    transport: ScriptedTransport

    def __init__(self, deadline: float = 1e9, *, send_timeout_seconds: float = 0) -> None:
        self.transport = ScriptedTransport(send_timeout_seconds)
        self.deadline = deadline
        self._thread = threading.get_ident()
        self._posted: list[Callback] = []
        self._changed = threading.Condition()
        self._sends: list[Task] = []
        self.sent: list[bytes] = []
        self.is_aborted = False

    def begin(self, serve: Serve) -> None:
        """The call arrives, which a coroutine serves."""
        self.transport.serve = serve
        self.serve()

    @property
    def timers(self) -> dict[Callback, float]:
        """The timers that are set."""
        return self.transport.timers

    @property
    def is_receiving(self) -> bool:
        """Whether a message was requested that is not delivered yet."""
        return self._awaits_message

    @property
    def has_sends(self) -> bool:
        """Whether a message is being sent."""
        return bool(self._sends)

    def deliver(self, message: bytes | None) -> None:
        """The next message arrives, or the caller sends no more."""
        self._received(message)

    def complete_send(self) -> None:
        """The transport has sent the oldest message."""
        self._sends.pop(0).resume(True)  # noqa: FBT003 - whether it was sent

    def complete(self) -> None:
        """The transport has sent the status."""
        assert self.ended_with is not None
        self._end()

    def cancel(self) -> None:
        """The caller leaves."""
        self._end()

    def run_timers(self) -> None:
        """Every timer is due."""
        timers = [*self.timers]
        self.timers.clear()
        for callback in timers:
            callback()

    def run_posted(self) -> None:
        """Waits for a callback of another thread, and runs it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._posted, PATIENCE_SECONDS)
            callback = self._posted.pop(0)
        callback()

    def _send_status(
        self,
        code: grpc.StatusCode,  # noqa: ARG002
        details: str,  # noqa: ARG002
        trailing: Metadata,  # noqa: ARG002
        message: bytes | None,
    ) -> None:
        if message is not None:
            self.sent.append(message)

    def abort(self) -> None:
        self.is_aborted = True

    def post(self, callback: Callback) -> None:
        if threading.get_ident() == self._thread:
            callback()
            return
        with self._changed:
            self._posted.append(callback)
            self._changed.notify()

    def _receive(self) -> None:
        """Until `deliver`."""

    async def _send(self, message: bytes, *, more: bool) -> bool:  # noqa: ARG002
        self.sent.append(message)
        success: bool = await suspend(self._sends.append)
        return success

    def authentication(self) -> Mapping[str, Sequence[bytes]]:
        return {}


def calls_of(
    method: Method, *, window: int = 3, limits: RpcOptions = UNLIMITED, observer: CallObserver | None = None
) -> Calls:
    """What serves calls of one method."""
    admission = Admission(limits, lambda *_: None)
    return Calls({METHOD: method}, observer or Observed(), admission, stream_window=window)


def started(method: Method, deadline: float = 1e9, **options: Any) -> ScriptedCall:
    """A call of a method that has arrived."""
    call = ScriptedCall(deadline)
    call.begin(calls_of(method, **options).serve)
    return call
