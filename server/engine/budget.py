"""The memory that requests may hold, from their arrival until their replies are sent, and who holds it."""

import threading
from typing import NamedTuple

from attention_serving.server.engine.errors import IdentityLimitError, OverloadedError
from attention_serving.server.engine.events import Timeline

# How many times what is free one identity may hold: see `server.api.admission`.
FREE_MULTIPLE = 4


class Caller(NamedTuple):
    """Whose request it is. Requests of one caller do not delay those of others more than its share allows.

    Attributes:
        name: Tells callers apart; empty for requests without a known caller.
        weight: Its share of the runs in relation to the other callers that have requests in the queue.
    """

    name: str = ""
    weight: float = 1.0


ANYONE = Caller()


class MemoryBudget:
    """Bounds the bytes of all requests in flight. May be used by any thread.

    Attributes:
        limit_bytes: Bytes that may be reserved at a time.
        held_bytes: Bytes that are reserved now.
        lock: Held by reservations while they change that.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Creates a budget of which nothing is reserved.

        Args:
            limit_bytes: Bytes that may be reserved at a time.
        """
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.lock = threading.Lock()


class Account:
    """What the requests of one identity hold.

    Attributes:
        held_bytes: Bytes of the budget.
        calls: Number of calls that are open.
        streams: Number of streams among them.
    """

    def __init__(self, limit: int) -> None:
        """Begins with nothing.

        Args:
            limit: Bytes that the identity may hold; 0 sets no limit.
        """
        self.held_bytes = self.calls = self.streams = 0
        self._limit = limit

    def check(self, size: int, reservation_bytes: int, free: int) -> None:
        """Checks that the identity may hold more bytes. Called with the lock of the budget.

        A request that alone exceeds the share is granted if the identity has no other.

        Args:
            size: Bytes that a reservation is to take in addition.
            reservation_bytes: Bytes that it holds already; they are part of `held_bytes`.
            free: Bytes that are not reserved.

        Raises:
            IdentityLimitError: The identity holds its limit, or its share.
        """
        if self.held_bytes <= reservation_bytes:
            return
        held_total = self.held_bytes + size
        if self._limit and held_total > self._limit:
            raise IdentityLimitError(
                f"requests of this identity would hold {held_total} bytes; its limit is {self._limit};"
                " try again later"
            )
        if held_total > FREE_MULTIPLE * (free - size):
            raise IdentityLimitError(
                f"requests of this identity would hold {held_total} bytes, which is more than its share while"
                f" {free} are free; try again later"
            )


class Reservation:
    """The bytes of one request.

    Attributes:
        size: Bytes that are reserved.
        timeline: Receives the stages of the request; None if the request is not recorded.
    """

    __slots__ = ("_account", "_budget", "size", "timeline")

    def __init__(
        self, budget: MemoryBudget, account: Account | None = None, timeline: Timeline | None = None
    ) -> None:
        """Begins with no bytes.

        Args:
            budget: What they are part of.
            account: Whose reservation it is; None without an identity.
            timeline: See the attribute.
        """
        self._budget, self._account, self.timeline = budget, account, timeline
        self.size = 0

    def add(self, size: int) -> None:
        """Reserves more bytes.

        A reservation that alone exceeds the limit is granted if nothing else is reserved.

        Raises:
            OverloadedError: The limit of the budget is reached, or that of the account; nothing has changed.
        """
        budget, account = self._budget, self._account
        with budget.lock:
            held_total = budget.held_bytes + size
            if account is not None:
                account.check(size, self.size, budget.limit_bytes - budget.held_bytes)
            if held_total > budget.limit_bytes and budget.held_bytes > self.size:
                raise OverloadedError(
                    f"requests in flight would hold {held_total} bytes; the limit is {budget.limit_bytes}; "
                    "try again later"
                )
            budget.held_bytes = held_total
            if account is not None:
                account.held_bytes += size
            self.size += size

    def release(self) -> None:
        """Frees all bytes. May be called more than once, by any thread."""
        budget = self._budget
        with budget.lock:
            size, self.size = self.size, 0
            budget.held_bytes -= size
            if self._account is not None:
                self._account.held_bytes -= size
