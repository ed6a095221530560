"""The seam between gRPC and the calls above it: what every transport provides.

A transport runs every callback, `accept` included, on one thread: the transport's thread. All methods of
`Call` must be called on that thread, except `call_soon_threadsafe`. Calls therefore need no locks.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import grpc

from attention_serving.server.engine.budget import Account
from attention_serving.server.rpc.records import CallRecord
from attention_serving.server.rpc.transport.connections import Address
from attention_serving.server.security.identities import Identity

Callback: TypeAlias = Callable[[], object]
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


class Call(Protocol):
    """One call, from its arrival to its end.

    Attributes:
        identity: Who calls, once that was checked; None if nobody had to say.
        account: What the identity holds of the memory of requests; None if nobody had to say.
        record: What is recorded of the call; None if nothing is.
    """

    identity: Identity | None = None
    account: Account | None = None
    record: CallRecord | None

    @property
    def method(self) -> str:
        """Full name of the method, such as `/attention.v1.AttentionService/Attend`."""

    @property
    def deadline(self) -> float:
        """When the caller stops waiting, on `time.monotonic`'s clock; infinite if there is no deadline."""

    @property
    def ended_with(self) -> grpc.StatusCode | None:
        """The status that was handed over, or that the call was cancelled with; None before.

        The call takes no reply any more. It is done when that status was sent: see `add_done_callback`.
        """

    @property
    def reason(self) -> str:
        """The stable reason that the call was ended with, such as OVERLOADED; empty if there is none."""

    @property
    def reader_cut(self) -> bool:
        """Whether the call was ended because the caller did not read what was sent to it."""

    @property
    def metadata(self) -> Metadata:
        """The metadata that the caller sent. The keys are in lower case."""

    @property
    def caller(self) -> str:
        """The verified identity for logs, such as `token:reports`; empty if nobody had to say."""
        return "" if self.identity is None else self.identity.caller.name

    @property
    def request_id(self) -> str:
        """What the log and the caller know the call by: see `server.request_ids`.

        It is sent with the status if the caller sent it, if the call failed, and if it was read before.
        """

    @property
    def known_request_id(self) -> str:
        """The same; empty if the caller sent none and none was made."""

    def peer_identities(self) -> tuple[str, ...]:
        """The names in the verified certificate of the client: see `server.tls.identities`.

        For a call through the HTTP process, the names of the client of that. Empty without mutual TLS. Call
        it before the call is done.
        """

    def client(self) -> str:
        """The connection of the caller, as ADDRESS:PORT. Through the HTTP process, that of its client."""

    def receive(self, then: Callable[[bytes | None], None]) -> None:
        """Requests the next message, and calls back with it; with None if there are no more."""

    def send(self, message: bytes, then: Callable[[bool], None], *, more: bool = False) -> None:
        """Sends one message of a stream. Does nothing if the call has ended.

        Args:
            message: The serialized message.
            then: Called when the core let the message out, so that the next may be sent; with False if the
                call can send no more.
            more: Whether the next message follows at once, so that both may be written together.
        """

    def reply(self, message: bytes) -> None:
        """Sends the only message of a call and ends the call with OK. Does nothing if it has ended."""

    def finish(
        self, code: grpc.StatusCode, details: str = "", trailing: Metadata = (), *, reason: str = ""
    ) -> None:
        """Ends the call. Does nothing if it has ended.

        Args:
            code: The status.
            details: Its text, for people.
            trailing: Metadata that is sent with it.
            reason: The stable reason, for metrics; it is not sent.
        """

    def add_done_callback(self, callback: Callback) -> None:
        """Calls back once the core is done with the call; at once if it is.

        That is when the caller's windows had room for all that was sent, the status included, or when the
        call was cancelled. What is sent is in memory until then.

        A callback that is added twice is called once.
        """

    def remove_done_callback(self, callback: Callback) -> None:
        """Removes a done callback. Does nothing if it is not there."""

    def call_at(self, moment: float, callback: Callback) -> Callback:
        """Calls back at a moment on `time.monotonic`'s clock.

        Returns:
            A function that cancels the callback. It does nothing once the callback ran.
        """

    def call_soon_threadsafe(self, callback: Callback) -> None:
        """Calls back on the transport's thread: at once if this is that thread.

        May be called on any thread. The callback may be dropped if the call has ended; one that is called
        checks `ended_with`.
        """


class Transport(Protocol):
    """A gRPC listener. Its life is `listen`, `start`, `stop`.

    Attributes:
        addresses: What `listen` has bound.
    """

    addresses: list[Address]

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

    def start(self, accept: Callable[[Call], None], run_inline: Callable[[], bool]) -> None:
        """Begins to accept calls.

        Args:
            accept: Called with each new call.
            run_inline: Does a piece of work, and returns whether to look for events and call it again without
                sleeping. A transport may call it on its own thread whenever it has no event to handle, or
                never.
        """

    def turned_at(self) -> float:
        """When the transport's thread last looked for work, on `time.monotonic`'s clock. For any thread.

        It does so at least once a second, unless something holds it up. If this is called less often, the
        value may be as old as the last call.
        """

    def stop(self, grace: float, refuse: Callback) -> None:
        """Accepts no more connections, and returns when the calls that are open have ended.

        May be called before `start`, and more than once.

        Args:
            grace: Seconds after which the calls that are left end with UNAVAILABLE. 0 ends them at once.
            refuse: Called on the transport's thread, at most once. `accept` must refuse calls from then on.
        """
