"""What the calls of all transports share: their end, the callbacks for it, and the time limit of sending."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import grpc

from attention_serving.server import request_ids
from attention_serving.server.engine.budget import Account
from attention_serving.server.rpc.records import CallRecord
from attention_serving.server.rpc.timeouts import CallAt, Timeouts
from attention_serving.server.rpc.transport import peer
from attention_serving.server.rpc.transport.seam import Callback, Metadata
from attention_serving.server.security.identities import Identity
from attention_serving.server.tls import forwarding

log = logging.getLogger(__name__)
NOT_READ = "the caller did not read what was sent to it in time"


class OpenCalls:
    """The calls of one transport until the core is done with them. Cuts off callers that do not read."""

    def __init__(self, call_at: CallAt, send_timeout_seconds: float) -> None:
        """Creates the record of a transport without calls.

        Args:
            call_at: Runs a callback of the transport's thread at a moment.
            send_timeout_seconds: How long a message or a status may wait for the caller to take it. 0 sets
                no limit.
        """
        self._call_at = call_at
        self._open: dict[BaseCall, None] = {}
        self._sending = Timeouts(send_timeout_seconds, BaseCall.cut_off)

    def __iter__(self) -> "Iterator[BaseCall]":
        """The calls that are open now."""
        return iter(tuple(self._open))

    def add(self, call: "BaseCall") -> None:
        """A call arrived."""
        if not call.is_done:
            self._open[call] = None

    def sending(self, call: "BaseCall") -> None:
        """Something of the call was handed to the core."""
        self._sending.add(call, self._call_at)

    def sent(self, call: "BaseCall") -> None:
        """The core let it out: the caller's windows had room for it."""
        self._sending.remove(call)

    def remove(self, call: "BaseCall") -> None:
        """The core is done with a call."""
        self._open.pop(call, None)
        self._sending.remove(call)


class BaseCall(ABC):
    """The end of a `Call`. All methods run on the transport's thread."""

    # Of the class, so that a call costs nothing for them where nobody has to say who calls.
    identity: Identity | None = None
    account: Account | None = None

    def __init__(self, method: str, calls: OpenCalls) -> None:
        self.method = method
        self.ended_with: grpc.StatusCode | None = None
        self.reason = ""
        self.reader_cut = False
        self.is_done = False
        self.record: CallRecord | None = None
        self._request_id = ""
        self._calls = calls
        # A dictionary is an ordered set from which a callback is removed in constant time.
        self._done_callbacks: dict[Callback, None] = {}

    @property
    @abstractmethod
    def peer(self) -> str:
        """The address of the caller, as the core writes it: it ends with a colon and the port."""

    @property
    @abstractmethod
    def metadata(self) -> Metadata:
        """See `Call`."""

    @property
    def caller(self) -> str:
        """See `Call`."""
        return "" if self.identity is None else self.identity.caller.name

    @property
    def request_id(self) -> str:
        """See `Call`."""
        self._request_id = self.known_request_id or request_ids.new()
        return self._request_id

    @property
    def known_request_id(self) -> str:
        """See `Call`."""
        if not self._request_id:
            self._request_id = request_ids.sent(self.metadata)
        return self._request_id

    def peer_identities(self) -> tuple[str, ...]:
        """See `Call`."""
        return peer.identities(self._authentication(), self.metadata)

    def client(self) -> str:
        """See `Call`."""
        return str(peer.forwarded(self._authentication(), self.metadata, forwarding.CLIENT) or self.peer)

    @abstractmethod
    def _authentication(self) -> Mapping[str, Sequence[bytes]]:
        """What the core knows of the peer: its authentication context."""

    @abstractmethod
    def finish(
        self, code: grpc.StatusCode, details: str = "", trailing: Metadata = (), *, reason: str = ""
    ) -> None:
        """See `Call`."""

    @abstractmethod
    def reset(self) -> None:
        """Ends the call at once, without what was not sent yet."""

    def add_done_callback(self, callback: Callback) -> None:
        """See `Call`."""
        if self.is_done:
            callback()
        else:
            self._done_callbacks[callback] = None

    def remove_done_callback(self, callback: Callback) -> None:
        """See `Call`."""
        self._done_callbacks.pop(callback, None)

    def cut_off(self) -> None:
        """The caller did not take what was sent to it."""
        self.reader_cut = True
        self.reset()

    def _trailing(self, code: grpc.StatusCode, trailing: Metadata = ()) -> Metadata:
        """The metadata that is sent with a status. An id that nobody knows yet is made for failures only."""
        if code is grpc.StatusCode.OK and not self.known_request_id:
            return trailing
        return (*trailing, (request_ids.KEY, self.request_id))

    def _hand_over(self, code: grpc.StatusCode, reason: str = "") -> None:
        """Records the status that is handed to the core. There is no other after it."""
        self.ended_with, self.reason = code, reason
        self._calls.sending(self)

    def _done(self) -> None:
        """The core is done with the call: its status was sent, or it was cancelled. Calls back, once."""
        if self.is_done:
            return
        self.is_done = True
        if self.ended_with is None:
            self.ended_with = grpc.StatusCode.CANCELLED
        self._calls.remove(self)
        callbacks, self._done_callbacks = self._done_callbacks, {}
        for callback in callbacks:
            try:
                callback()
            except Exception:  # the failure of one callback must not prevent the others
                log.exception("done callback failed", extra={"method": self.method})
