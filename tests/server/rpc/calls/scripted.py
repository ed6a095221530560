"""A call whose events the test decides: an adapter of the seam, for orders that no network forces."""

from collections.abc import Callable

import grpc

from attention_serving.server.rpc.transport.seam import Call, Callback, Metadata


class ScriptedCall(Call):
    """A `Call`. The test delivers messages, lets sends complete, and lets the caller leave."""

    record = None
    metadata = ()
    request_id = known_request_id = "scripted"

    def __init__(self, deadline: float = 1e9) -> None:
        self._deadline = deadline
        self._code: grpc.StatusCode | None = None
        self._receivers: list[Callable[[bytes | None], None]] = []
        self._sends: list[Callable[[bool], None]] = []
        self.done_callbacks: dict[Callback, None] = {}
        self.timers: dict[Callback, float] = {}
        self.sent: list[bytes] = []

    @property
    def method(self) -> str:
        return "/tests.Scripted/Method"

    @property
    def deadline(self) -> float:
        return self._deadline

    @property
    def ended_with(self) -> grpc.StatusCode | None:
        return self._code

    @property
    def reason(self) -> str:
        return ""

    @property
    def reader_cut(self) -> bool:
        return False

    def peer_identities(self) -> tuple[str, ...]:
        return ()

    def client(self) -> str:
        return ""

    @property
    def is_receiving(self) -> bool:
        """Whether a message was requested that is not delivered yet."""
        return bool(self._receivers)

    def deliver(self, message: bytes | None) -> None:
        """The next message arrives, or the caller sends no more."""
        self._receivers.pop(0)(message)

    def complete_send(self) -> None:
        """The transport has sent the oldest message."""
        self._sends.pop(0)(True)  # noqa: FBT003 - as the seam calls it

    def run_timers(self) -> None:
        """Every timer is due."""
        timers, self.timers = self.timers, {}
        for callback in timers:
            callback()

    def cancel(self) -> None:
        """The caller leaves."""
        self.finish(grpc.StatusCode.CANCELLED)

    def receive(self, then: Callable[[bytes | None], None]) -> None:
        self._receivers.append(then)

    def send(self, message: bytes, then: Callable[[bool], None], *, more: bool = False) -> None:  # noqa: ARG002
        if self._code is None:
            self.sent.append(message)
            self._sends.append(then)

    def reply(self, message: bytes) -> None:
        if self._code is None:
            self.sent.append(message)
            self.finish(grpc.StatusCode.OK)

    def finish(
        self,
        code: grpc.StatusCode,
        details: str = "",  # noqa: ARG002
        trailing: Metadata = (),  # noqa: ARG002
        *,
        reason: str = "",  # noqa: ARG002
    ) -> None:
        if self._code is None:
            self._code = code
            callbacks, self.done_callbacks = self.done_callbacks, {}
            for callback in callbacks:
                callback()

    def add_done_callback(self, callback: Callback) -> None:
        if self._code is None:
            self.done_callbacks[callback] = None
        else:
            callback()

    def remove_done_callback(self, callback: Callback) -> None:
        self.done_callbacks.pop(callback, None)

    def call_at(self, moment: float, callback: Callback) -> Callback:
        self.timers[callback] = moment
        return lambda: self.timers.pop(callback, None)

    def call_soon_threadsafe(self, callback: Callback) -> None:
        callback()


class AdmitAll:
    """An admission without limits."""

    def received(self, call: Call) -> None:
        """A request arrived."""

    def idle(self, call: Call) -> None:
        """Every reply has been sent."""


FREELY = AdmitAll()
