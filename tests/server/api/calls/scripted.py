"""A call whose events the test decides: an adapter of `Call`, for orders that no network forces."""

import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import grpc

from attention_serving.server.api.admission import CallLimits
from attention_serving.server.api.calls import Calls
from attention_serving.server.api.method import Method
from attention_serving.server.coroutines import Callback, Task, Wait, suspend
from attention_serving.server.transport.call import OK, Call, Metadata, OpenCalls
from tests.server.seams import PATIENCE_SECONDS
from tests.server.seams import Calls as Observed

METHOD = "/tests.Scripted/Method"
UNLIMITED = CallLimits(max_calls=1000, max_streams=1000)


class ScriptedCall(Call):
    """A `Call` on the thread that creates it.

    The test delivers messages, lets sends and the status complete, and lets the caller leave. Callbacks of
    other threads wait until the test runs them.
    """

    peer = ""
    metadata: Metadata = ()

    def __init__(self, deadline: float = 1e9, *, send_timeout_seconds: float = 0) -> None:
        super().__init__(METHOD, OpenCalls(send_timeout_seconds))
        self.deadline = deadline
        self._thread = threading.get_ident()
        self._posted: list[Callback] = []
        self._changed = threading.Condition()
        self._sends: list[Task] = []
        self.timers: dict[Callback, float] = {}
        self.sent: list[bytes] = []
        self.is_aborted = False

    def begin(self, work: Coroutine[Wait, Any, None]) -> None:
        """The call arrives, which a coroutine serves."""
        self._calls.begin(self, work)

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
        timers, self.timers = self.timers, {}
        for callback in timers:
            callback()

    def run_posted(self) -> None:
        """Waits for a callback of another thread, and runs it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._posted, PATIENCE_SECONDS)
            callback = self._posted.pop(0)
        callback()

    def reply(self, message: bytes) -> None:
        if self.ended_with is None:
            self.sent.append(message)
            self.finish(OK)

    def finish(
        self,
        code: grpc.StatusCode,
        details: str = "",  # noqa: ARG002
        trailing: Metadata = (),  # noqa: ARG002
        *,
        reason: str = "",
    ) -> None:
        if self.ended_with is None:
            self._hand_over(code, reason)

    def abort(self) -> None:
        self.is_aborted = True

    def call_at(self, moment: float, callback: Callback) -> Callback:
        self.timers[callback] = moment
        return lambda: self.timers.pop(callback, None)

    def post(self, callback: Callback) -> None:
        if threading.get_ident() == self._thread:
            callback()
            return
        with self._changed:
            self._posted.append(callback)
            self._changed.notify()

    def _receive(self, task: Task) -> None:
        """Until `deliver`."""

    async def _send(self, message: bytes, *, more: bool) -> bool:  # noqa: ARG002
        self.sent.append(message)
        success: bool = await suspend(self._sends.append)
        return success

    def _authentication(self) -> Mapping[str, Sequence[bytes]]:
        return {}


def calls_of(method: Method, *, window: int = 3, **options: Any) -> Calls:
    """What serves calls of one method."""
    chosen: dict[str, Any] = {"observer": Observed(), "limits": UNLIMITED, **options}
    return Calls({METHOD: method}, check_deadline=lambda *_: None, stream_window=window, **chosen)


def started(method: Method, deadline: float = 1e9, **options: Any) -> ScriptedCall:
    """A call of a method that has arrived."""
    call = ScriptedCall(deadline)
    call.begin(calls_of(method, **options).serve(call))
    return call
