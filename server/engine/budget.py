"""The memory that requests may hold, from their arrival until their replies are sent."""

import threading
from abc import ABC, abstractmethod

from attention_serving.server.engine.errors import OverloadedError
from attention_serving.server.engine.statistics import Timeline


class MemoryBudget:
    """Bounds the bytes of all requests in flight. May be used by any thread."""

    def __init__(self, limit_bytes: int) -> None:
        """Creates a budget of which nothing is reserved.

        Args:
            limit_bytes: Bytes that may be reserved at a time.
        """
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that are reserved now."""
        return self._held_bytes

    def reserve(self, size: int, account: "Account | None" = None) -> "Reservation":
        """Reserves bytes until they are released.

        A reservation that alone exceeds the limit is granted if nothing else is reserved.

        Args:
            size: Number of bytes.
            account: Whose reservation it is; None if nobody's.

        Raises:
            OverloadedError: The limit is reached, or that of the account.
        """
        reservation = Reservation(self, account)
        self.add(reservation, size)
        return reservation

    def add(self, reservation: "Reservation", size: int) -> None:
        """Adds bytes to a reservation of this budget.

        Raises:
            OverloadedError: The limit is reached, or that of the account; the reservation is as before.
        """
        with self._lock:
            own, account = reservation._size, reservation._account
            held = self._held_bytes + size
            if account is not None:
                account.check(size, own, self.limit_bytes - self._held_bytes)
            if held > self.limit_bytes and self._held_bytes > own:
                raise OverloadedError(
                    f"requests in flight would hold {held} bytes; the limit is {self.limit_bytes}; "
                    "try again later"
                )
            self._held_bytes = held
            if account is not None:
                account.held_bytes += size
            reservation._size += size


class Account(ABC):
    """What one caller holds of a budget. Its methods are called with the lock of the budget.

    Attributes:
        held_bytes: Bytes that are reserved now.
    """

    def __init__(self) -> None:
        """Begins with nothing."""
        self.held_bytes = 0

    @abstractmethod
    def check(self, size: int, own: int, free: int) -> None:
        """Checks that the caller may hold more.

        Args:
            size: Bytes that a reservation is to take in addition.
            own: Bytes that it holds already; they are part of `held_bytes`.
            free: Bytes that nobody has reserved.

        Raises:
            OverloadedError: The caller holds its share.
        """


class Reservation:
    """The bytes of one request. Made by `MemoryBudget.reserve`.

    Attributes:
        timeline: Receives the stages of the request; None if nobody asked for them.
    """

    __slots__ = ("_account", "_budget", "_size", "timeline")

    def __init__(self, budget: MemoryBudget, account: Account | None = None) -> None:
        self._budget = budget
        self._account = account
        self._size = 0
        self.timeline: Timeline | None = None

    @property
    def size(self) -> int:
        """Bytes that are reserved."""
        return self._size

    def add(self, size: int) -> None:
        """Reserves more bytes.

        Raises:
            OverloadedError: The limit is reached; the reservation is as before.
        """
        self._budget.add(self, size)

    def release(self) -> None:
        """Frees all bytes. May be called more than once, by any thread."""
        budget = self._budget
        with budget._lock:
            size, self._size = self._size, 0
            budget._held_bytes -= size
            if self._account is not None:
                self._account.held_bytes -= size
