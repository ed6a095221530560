"""A call whose events the test decides: an adapter of `Call`, for orders that no network forces."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attention_serving.server.api.admission import AdmissionControl
from attention_serving.server.api.calls import Calls
from attention_serving.server.api.method import Method
from attention_serving.server.coroutines import Callback, Task, suspend
from attention_serving.server.engine.budget import Caller
from attention_serving.server.engine.events import EventLog
from attention_serving.server.settings import Settings
from attention_serving.server.transport.call import Call, CallHandler, Metadata, Transport
from tests.server.seams import PATIENCE_SECONDS, settings_of

METHOD = "/tests.Scripted/Method"
UNLIMITED = settings_of(
    max_concurrent_calls=1000,
    max_streams=1000,
    stream_window=3,
    message_timeout_seconds=0,
    stream_idle_seconds=0,
)


class ScriptedTransport(Transport):
    """The transport of one call, which is never started."""

    listen = start = stop = post = NotImplemented


class ScriptedCall(Call):
    """A `Call` on the thread that creates it.

    The test delivers messages, lets sends and the status complete, and lets the caller leave. Callbacks of
    other threads wait until the test runs them.
    """

    peer = ""
    metadata: Metadata = ()
    method = METHOD
    transport: ScriptedTransport

    def __init__(self, deadline: float = 1e9) -> None:
        self.transport = ScriptedTransport(0)
        self.deadline = deadline
        self._thread = threading.get_ident()
        self._posted: list[Callback] = []
        self._changed = threading.Condition()
        self._sends: list[Task] = []
        self.sent: list[bytes] = []

    def begin(self, handler: CallHandler) -> None:
        """The call arrives, which a coroutine serves."""
        self.transport.handler = handler
        self.start()

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
        self._sends.pop(0).resume()

    def complete(self) -> None:
        """The transport has sent the status."""
        assert self.status_code is not None
        self._end()

    def cancel(self) -> None:
        """The caller leaves."""
        self._end()

    def wait_long(self) -> None:
        """What the call waits for does not come for a long time."""
        self.transport.sweep(self.transport.now + 100)

    def run_posted(self) -> None:
        """Waits for a callback of another thread, and runs it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._posted, PATIENCE_SECONDS)
            callback = self._posted.pop(0)
        callback()

    def _send_status(self, *status: Any) -> None:
        message = status[-1]
        if message is not None:
            self.sent.append(message)

    def abort(self) -> None:
        """Nothing that is sent waits for too long."""

    def post(self, callback: Callback) -> None:
        if threading.get_ident() == self._thread:
            callback()
            return
        with self._changed:
            self._posted.append(callback)
            self._changed.notify()

    def _receive(self) -> None:
        """Until `deliver`."""

    async def _send(self, message: bytes, *, more: bool) -> None:  # noqa: ARG002
        self.sent.append(message)
        await suspend(self._sends.append)

    def authentication(self) -> Mapping[str, Sequence[bytes]]:
        return {}


def calls_of(
    method: Method,
    limits: Settings = UNLIMITED,
    check_deadline: Callable[[float, Caller], None] = lambda *_: None,
    events: EventLog | None = None,
) -> Calls:
    """What serves calls of one method."""
    return Calls({METHOD: method}, events or EventLog(), AdmissionControl(limits, check_deadline))


def started(method: Method, limits: Settings = UNLIMITED) -> ScriptedCall:
    """A call of a method that has arrived."""
    call = ScriptedCall()
    call.begin(calls_of(method, limits).serve)
    return call
