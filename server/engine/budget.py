"""The memory that requests may hold, from their arrival until their replies are sent."""

import threading

from server.engine.errors import OverloadedError
from server.engine.timeline import Timeline


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

    def reserve(self, size: int) -> "Reservation":
        """Reserves bytes until they are released.

        A reservation that alone exceeds the limit is granted if nothing else is reserved.

        Raises:
            OverloadedError: The limit is reached.
        """
        reservation = Reservation(self)
        reservation.add(size)
        return reservation

    def _add(self, size: int, own: int) -> None:
        """Takes bytes for a reservation that holds `own` bytes already."""
        with self._lock:
            held = self._held_bytes + size
            if held > self.limit_bytes and self._held_bytes > own:
                raise OverloadedError(
                    f"requests in flight would hold {held} bytes; the limit is {self.limit_bytes}; "
                    "try again later"
                )
            self._held_bytes = held

    def _subtract(self, size: int) -> None:
        with self._lock:
            self._held_bytes -= size


class Reservation:
    """The bytes of one request. Made by `MemoryBudget.reserve`.

    Attributes:
        timeline: Receives the stages of the request; None if nobody asked for them.
    """

    __slots__ = ("_budget", "_size", "timeline")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
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
        self._budget._add(size, self._size)
        self._size += size

    def release(self) -> None:
        """Frees all bytes. May be called more than once."""
        size, self._size = self._size, 0
        if size:
            self._budget._subtract(size)
