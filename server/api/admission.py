"""Which calls the server takes: the guard around every method, and the one place of the limits on calls.

A call is refused before anything of it is received if the server drains, if it is not known who calls, or if
that identity does not have the right or holds its share.

A call of inference (`Method.is_inference`)
    waits for its first message: at most `max_waiting_calls` do, each for `message_timeout_seconds`. It holds
    no slot, so that callers who only open calls do not keep others from being served. It is refused at once
    if no slot is free, or if the work that is queued leaves no time before its deadline.
    Then it takes a slot, of which there are `max_concurrent_calls`, and keeps it until the core has sent its
    reply or the call has ended. An ordered stream takes one of `max_streams` too, and may wait
    `stream_idle_seconds` for its next message while no reply is outstanding.

A call of any other method (liveness, readiness, health, metadata, reflection)
    takes no slot. A bound of their own, `max_waiting_calls` again, holds from their arrival to their end.

Before both, HTTP/2 bounds the calls of one connection: the client's library makes further calls wait.

In addition to a limit of its own, an identity may hold at most four times what is free: of calls, of streams
and of memory. One identity alone takes 4/5 of everything; two greedy ones take 4/9 each, and n of them leave
1/(1 + 4n) for those that come later.
Source: dynamic queue length thresholds, Choudhury and Hahne 1998.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from typing import cast
from weakref import WeakValueDictionary

from attention_serving.server.api.errors import finish_with_error
from attention_serving.server.api.method import Method
from attention_serving.server.engine.budget import FREE_MULTIPLE, Account, Caller
from attention_serving.server.engine.errors import (
    Code,
    EngineError,
    IdentityLimitError,
    OverloadedError,
    ShuttingDownError,
)
from attention_serving.server.security import peers
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.rights import Identity
from attention_serving.server.settings import Settings
from attention_serving.server.transport.call import Call

DRAINING = "the server is shutting down; retry on another server"
# How long the first message of a call may still take to arrive once a drain has begun.
ARRIVING_SECONDS = 0.5
# The property of gRPC's authentication context that has the client's certificate.
CERTIFICATE = "x509_pem_cert"


class ReceiveTimeoutError(EngineError, code=Code.DEADLINE_EXCEEDED, reason="RECEIVE_TIMEOUT"):
    """The call was opened, but its first message did not arrive in time."""


class IdleStreamError(EngineError, code=Code.UNAVAILABLE, reason="STREAM_IDLE"):
    """The stream had nothing to answer for longer than the server allows."""


class CallSlots(set[Call]):
    """The calls that hold a slot of one kind.

    Attributes:
        limit: Number of slots. Whoever adds a call checks that one is free.
    """

    def __init__(self, limit: int, are_taken: str) -> None:
        """Begins with none.

        Args:
            limit: Number of slots.
            are_taken: What to say if that many are: "calls are open".
        """
        super().__init__()
        self.limit, self._are_taken = limit, are_taken

    def full_error(self) -> OverloadedError:
        """What to refuse a call with if no slot is free."""
        return OverloadedError(
            f"{self.limit} {self._are_taken}, which is this server's limit; try again later"
        )


class AdmissionControl:
    """Admits the calls of a server. For the transport's thread; any thread may read how many there are.

    Attributes:
        options: How many calls are open at a time, and how long they may wait for messages.
        calls: Calls of inference whose message has arrived.
        streams: Ordered streams among them.
        waiting: Calls of inference whose message has not arrived.
        other_calls: Calls of other methods.
        waiting_other_calls: Those of them whose message has not arrived.
    """

    def __init__(
        self, options: Settings, check_deadline: Callable[[float, Caller], None], guard: Guard | None = None
    ) -> None:
        """Creates the admission of a server.

        Args:
            options: How many calls are open at a time, and how long they may wait for messages.
            check_deadline: Raises OverloadedError if a call with that deadline, and of that caller, would be
                answered too late.
            guard: Authenticates and authorises calls; None allows everything.
        """
        self.calls = CallSlots(options.max_concurrent_calls, "calls are open")
        self.streams = CallSlots(options.max_streams, "streams are open")
        self.waiting = CallSlots(options.max_waiting_calls, "calls wait for their messages")
        self._inference_slots = self.calls, self.waiting
        self.other_calls = CallSlots(
            options.max_waiting_calls, "calls of health, metadata and reflection are open"
        )
        self.waiting_other_calls: set[Call] = set()
        # The calls and streams of all identities, from their arrival.
        self._identified_calls = self._identified_streams = 0
        # Each lives as long as a call or a reservation that refers to it.
        self._accounts: WeakValueDictionary[tuple[Caller, int], Account] = WeakValueDictionary()
        self.options, self._check_deadline, self._guard = options, check_deadline, guard
        self._is_draining = False

    def start_waiting(self, call: Call, method: Method) -> None:
        """Lets a call that has arrived wait for its first message.

        Raises:
            EngineError: It is refused.
        """
        is_unary = method.kind == "unary"
        if self._is_draining and (method.is_inference or not is_unary):
            raise ShuttingDownError(DRAINING)
        if self._guard is not None:
            self.authenticate(call, method)
        if method.is_inference:
            if call.identity is not None:
                self._take_share(call, method, call.identity)
            if is_unary and call.deadline != math.inf:
                self._check_deadline(call.deadline, call.caller)
            for slots in self._inference_slots if is_unary else (*self._inference_slots, self.streams):
                if len(slots) >= slots.limit:
                    raise slots.full_error()
            self.waiting.add(call)
        else:
            if len(self.other_calls) >= self.other_calls.limit:
                raise self.other_calls.full_error()
            self.other_calls.add(call)
            self.waiting_other_calls.add(call)
        call.set_wait_timeout(self.options.message_timeout_seconds, self._end_unreceived)

    def authenticate(self, call: Call, method: Method) -> None:
        """Notes who calls: for each message of a stream again, because a token may expire or be revoked.

        Raises:
            CredentialsError: It is not known who calls.
            PermissionDeniedError: The identity does not have the right.
        """
        if self._guard is None or method.right is None:
            return
        identity = self._guard.authenticate(
            call.metadata, partial(peer_identities, call), partial(client_of, call)
        )
        if call.record is not None:
            call.record.caller = identity.caller.name
        identity.require(method.right)
        call.identity, call.caller = identity, identity.caller

    def admit(self, call: Call, method: Method) -> None:
        """Gives a call whose first message arrived its slot.

        Raises:
            OverloadedError: All slots are taken.
        """
        call.wait_deadline = math.inf
        if not method.is_inference:
            self.waiting_other_calls.discard(call)
            return
        self.waiting.discard(call)
        if len(self.calls) >= self.calls.limit:
            raise self.calls.full_error()
        self.calls.add(call)
        if method.kind != "unary":
            if len(self.streams) >= self.streams.limit:
                raise self.streams.full_error()
            self.streams.add(call)

    def start_idle_timeout(self, call: Call) -> None:
        """Limits how long a stream, whose replies have all been sent, waits for its next request."""
        if call.status_code is None:  # otherwise it waits until its status is sent
            call.set_wait_timeout(self.options.stream_idle_seconds, self._end_idle_stream)

    def leave(self, call: Call, method: Method) -> None:
        """The core is done with a call: what it held is free."""
        if method.is_inference:
            self.calls.discard(call)
            self.waiting.discard(call)
            self.streams.discard(call)
        else:
            self.other_calls.discard(call)
            self.waiting_other_calls.discard(call)
        if call.account is not None:
            self._count(call, method, -1)

    def drain(self) -> None:
        """Refuses calls from now on, and ends those whose first message does not arrive very soon."""
        self._is_draining = True
        for call in (*self.waiting, *self.waiting_other_calls):
            call.set_wait_timeout(ARRIVING_SECONDS, _refuse)

    def _take_share(self, call: Call, method: Method, identity: Identity) -> None:
        """Takes what a call of inference holds of the shares of its identity."""
        account = self.account_of(identity)
        check_share("calls", account.calls, self._identified_calls, self.calls.limit, identity.max_calls)
        if method.kind != "unary":
            check_share("streams", account.streams, self._identified_streams, self.streams.limit)
        call.account = account
        self._count(call, method, 1)

    def _count(self, call: Call, method: Method, change: int) -> None:
        account = cast("Account", call.account)
        account.calls += change
        self._identified_calls += change
        if method.kind != "unary":
            account.streams += change
            self._identified_streams += change

    def account_of(self, identity: Identity) -> Account:
        """What an identity holds."""
        key = identity.caller, identity.max_bytes
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(identity.max_bytes)
        return account

    def _end_unreceived(self, call: Call) -> None:
        seconds = self.options.message_timeout_seconds
        finish_with_error(
            call, ReceiveTimeoutError(f"no message of the call arrived within {seconds:g} seconds")
        )

    def _end_idle_stream(self, call: Call) -> None:
        seconds = self.options.stream_idle_seconds
        finish_with_error(call, IdleStreamError(f"the stream was idle for {seconds:g} seconds; open another"))


def _refuse(call: Call) -> None:
    finish_with_error(call, ShuttingDownError(DRAINING))


def peer_identities(call: Call) -> tuple[str, ...]:
    """The names in the verified certificate of the client: see `server.security.peers`.

    For a call through the HTTP process, the names of the client of that. Empty without mutual TLS.
    """
    context = call.authentication()
    if certificates := context.get(CERTIFICATE):
        return peers.names_in(certificates[0])
    claimed = peers.read_claim(context, call.metadata, peers.FORWARDED)
    return () if claimed is None else tuple(json.loads(claimed))


def client_of(call: Call) -> str:
    """The connection of the caller, as ADDRESS:PORT. Through the HTTP process, that of its client."""
    return str(peers.read_claim(call.authentication(), call.metadata, peers.CLIENT) or call.peer)


def check_share(noun: str, count: int, total: int, slots: int, limit: int = 0) -> None:
    """Checks that an identity may take one more slot. It always may if it holds none and has no limit.

    Args:
        noun: What the slots are for, in the plural.
        count: Number of slots that the identity holds.
        total: Number of those that all identities hold.
        slots: Number of all slots.
        limit: Most that the identity may hold; 0 sets no limit of its own.

    Raises:
        IdentityLimitError: It holds its limit, or its share.
    """
    message = f"{count} {noun} of this identity are open, which is its"
    if limit and count >= limit:
        raise IdentityLimitError(f"{message} limit; try again later")
    if count and count >= FREE_MULTIPLE * (slots - total):
        raise IdentityLimitError(f"{message} share while {total} of {slots} are; try again later")
