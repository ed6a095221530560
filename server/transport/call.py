"""One call of a client, and the transport that brings it, as every adapter provides them.

A transport drives the coroutine of each call on one thread, on which all methods of `Call` must be called.
Calls therefore need no locks.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from types import coroutine
from typing import Any, TypeAlias

import grpc

from attention_serving.server.coroutines import Callback, Task, Wait
from attention_serving.server.engine.budget import ANYONE, Account, Caller
from attention_serving.server.observe.records import REQUEST_ID, CallRecord, new_request_id, sent_request_id
from attention_serving.server.security.rights import Identity

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
Address: TypeAlias = int | str
"""One end of a connection: a TCP port, or the path of a Unix domain socket, which is empty for a client."""
OK = grpc.StatusCode.OK
SLOW_READER_MESSAGE = "the caller did not read what was sent to it in time"
# The reason of such calls, which is not sent: their callers would not read it.
SLOW_READER = "SLOW_READER"
# How often the calls are looked through for one that has waited for too long, in seconds.
SWEEP_SECONDS = 0.1
# How long gRPC's core may take for what it does at once unless something is wrong.
CORE_TIMEOUT_SECONDS = 1.0
# If a call has no deadline, gRPC's core reports one that is centuries away.
FOREVER_SECONDS = 365 * 24 * 3600.0


def deadline_after(seconds: float) -> float:
    """The moment that many seconds from now on `time.monotonic`'s clock; infinite if that is over a year."""
    return math.inf if seconds > FOREVER_SECONDS else time.monotonic() + seconds


class Call(Task, ABC):
    """One call, from its arrival until the core is done with it, and the task that serves it.

    Attributes:
        method: Full name of the method, such as `/attention.v1.AttentionService/Attend`.
        deadline: When the caller stops waiting, on `time.monotonic`'s clock; infinite without a deadline.
        metadata: The metadata that the caller sent. The keys are in lower case.
        identity: Who calls, once that was checked; None without authentication.
        caller: The same, for shares of runs and for stored contexts.
        account: What the identity holds of the memory of requests; None without authentication.
        record: What is recorded of the call; None if nothing is.
        status_code: The status that was handed over, or that the call was cancelled with; None before. The
            call takes no reply any more. It is done when that status was sent.
        reason: The stable reason that the call was ended with, such as OVERLOADED; empty if there is none.
        is_done: Whether the core is done with the call: the caller's windows had room for all that was sent,
            the status included, or the call was cancelled. What is sent is in memory until then.
        receives_no_more: Whether `stop_receiving` was called.
        wait_deadline: When the present wait has taken too long; infinite if it may take any time.
        on_wait_timeout: Is called with the call if it does.
        transport: What the call arrived by.
    """

    # Of the class, so that a call costs nothing for them.
    identity: Identity | None = None
    caller: Caller = ANYONE
    account: Account | None = None
    record: CallRecord | None = None
    status_code: grpc.StatusCode | None = None
    reason = ""
    is_done = receives_no_more = False
    wait_deadline = math.inf
    on_wait_timeout: "Callable[[Call], object]"
    transport: "Transport"
    method: str
    metadata: Metadata
    deadline: float
    _request_id = ""
    _awaits_message = False

    @property
    @abstractmethod
    def peer(self) -> str:
        """The address of the caller, as the core writes it: it ends with a colon and the port."""

    @abstractmethod
    def authentication(self) -> Mapping[str, Sequence[bytes]]:
        """What the core knows of the peer: its authentication context. Before the call is done."""

    def ensure_request_id(self) -> str:
        """What the log and the caller know the call by: see `server.observe.records`. Makes one if needed.

        It is sent with the status if the caller sent it, if the call failed, and if it was made before.
        """
        self._request_id = self.request_id or new_request_id()
        return self._request_id

    @property
    def request_id(self) -> str:
        """The same; empty if the caller sent none and none was made."""
        if not self._request_id:
            self._request_id = sent_request_id(self.metadata)
        return self._request_id

    @coroutine
    def message(self) -> Generator[Wait, Any, bytes | None]:
        """Waits for the next message; None if there are no more."""
        if self.receives_no_more or self.status_code is not None:
            return None
        self._awaits_message = True
        self._receive()
        message: bytes | None = yield None
        return message

    def stop_receiving(self) -> None:
        """Takes no further message: `message` returns None."""
        self.receives_no_more = True
        self._received(None)

    async def send(self, message: bytes, *, more: bool = False) -> None:
        """Sends one message of a stream, and waits until the next may be sent.

        Args:
            message: The serialized message.
            more: Whether the next message follows at once, so that both may be written together.
        """
        if self.status_code is not None:
            return
        self.set_wait_timeout(self.transport.send_timeout_seconds, Call.abort_slow_reader)
        await self._send(message, more=more)
        if self.status_code is None:  # otherwise the status, which follows the message, is not sent yet
            self.wait_deadline = math.inf

    def finish(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing: Metadata = (),
        *,
        reason: str = "",
        message: bytes | None = None,
    ) -> None:
        """Ends the call. Does nothing if it has ended.

        Args:
            code: The status.
            details: Its text, for people.
            trailing: Metadata that is sent with it. The id of the request is added if the call failed, or if
                it is known: a new one is made for failures only.
            reason: The stable reason, for metrics; it is not sent.
            message: A last message that is sent before.
        """
        if self.status_code is not None:
            return
        self.status_code, self.reason = code, reason
        self.set_wait_timeout(self.transport.send_timeout_seconds, Call.abort_slow_reader)
        if code is not OK or self._request_id or sent_request_id(self.metadata):
            trailing = (*trailing, (REQUEST_ID, self.ensure_request_id()))
        self._send_status(code, details, trailing, message)

    def set_wait_timeout(self, seconds: float, on_wait_timeout: "Callable[[Call], object]") -> None:
        """Calls back unless `wait_deadline` is set again within that many seconds, a tenth more or less.

        Args:
            seconds: How long the wait may take; 0 sets no limit.
            on_wait_timeout: Called with the call if it takes longer.
        """
        self.wait_deadline = self.transport.now + seconds if seconds else math.inf
        self.on_wait_timeout = on_wait_timeout

    def abort_slow_reader(self) -> None:
        """Ends the call, because its caller did not take what was sent to it."""
        self.status_code, self.reason = grpc.StatusCode.UNAVAILABLE, SLOW_READER
        self.abort()

    @abstractmethod
    def abort(self) -> None:
        """Ends the call at once, without what was not sent yet."""

    @abstractmethod
    def _receive(self) -> None:
        """Requests the next message, and hands it to `_received`; None if there are no more."""

    @abstractmethod
    async def _send(self, message: bytes, *, more: bool) -> None:
        """Sends a message, and waits until the core let it out or the call has ended."""

    @abstractmethod
    def _send_status(
        self, code: grpc.StatusCode, details: str, trailing: Metadata, message: bytes | None
    ) -> None:
        """Sends the message, if there is one, and the status: see `finish`."""

    def _received(self, message: bytes | None) -> None:
        """A message arrived. It is dropped if the call no longer waits for one."""
        if self._awaits_message:
            self._awaits_message = False
            self.resume(None if self.status_code is not None else message)

    def start(self) -> None:
        """Begins to serve the call, which has arrived."""
        self.transport.calls.add(self)
        self._coroutine = self.transport.handler(self)
        self.resume()

    def _end(self, _event: object = None) -> None:
        """The core is done with the call: its status was sent, or it was cancelled."""
        if self.is_done:
            return
        self.is_done = True
        if self.status_code is None:
            self.status_code = grpc.StatusCode.CANCELLED
        self.transport.calls.discard(self)
        self.close()


# Serves a new call.
CallHandler: TypeAlias = Callable[[Call], Coroutine[Wait, Any, None]]


class Transport(ABC):
    """A gRPC listener, and its calls until the core is done with them. Its life is `listen`, `start`, `stop`.

    Attributes:
        addresses: What `listen` has bound.
        send_timeout_seconds: How long what is sent may wait for the caller to take it. 0 sets no limit.
        calls: The calls that are open now.
        now: When the transport's thread last looked for work, on `time.monotonic`'s clock. It does so ten
            times a second, unless something holds it up.
        handler: Serves a new call.
    """

    handler: CallHandler

    def __init__(self, send_timeout_seconds: float) -> None:
        self.addresses: list[Address] = []
        self.send_timeout_seconds = send_timeout_seconds
        self.calls: set[Call] = set()
        self.now = time.monotonic()

    @abstractmethod
    def listen(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Binds an address, such as `127.0.0.1:8001` or `unix:/path`, and returns its port, if it has one.

        May be called several times.

        The operating system accepts connections from now on, but nothing is read from them before
        `start`: calls wait.

        Args:
            address: The address.
            credentials: Of this address alone; None accepts connections without encryption.

        Raises:
            RuntimeError: The address is in use, or does not belong to this machine.
        """

    @abstractmethod
    def start(self, handler: CallHandler, run_inline: Callable[[], bool]) -> None:
        """Begins to accept calls.

        Args:
            handler: Serves a new call.
            run_inline: Does a piece of work, and returns whether to look for events and call it again without
                sleeping. A transport may call it on its own thread whenever it has no event to handle, or
                never.
        """

    @abstractmethod
    def stop(self, grace: float, refuse: Callback) -> None:
        """Accepts no more connections, and returns when the calls that are open have ended.

        May be called before `start`, and more than once.

        Args:
            grace: Seconds after which the calls that are left end with UNAVAILABLE. 0 ends them at once.
            refuse: Called on the transport's thread, at most once. Calls must be refused from then on.
        """

    @abstractmethod
    def post(self, callback: Callback) -> None:
        """Calls back on the transport's thread, soon. For any thread."""

    def sweep(self, now: float) -> None:
        """Ends the waits that have taken too long."""
        self.now = now
        for call in [call for call in self.calls if call.wait_deadline < now]:
            call.wait_deadline = math.inf
            call.on_wait_timeout(call)
