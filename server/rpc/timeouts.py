"""Finds what has waited too long, with one timer for all that wait."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

K = TypeVar("K")
# Runs a callback at a moment on `time.monotonic`'s clock.
CallAt: TypeAlias = Callable[[float, Callable[[], Any]], Any]


class Timeouts(Generic[K]):
    """Members that must be removed within a time. For the transport's thread.

    Most are removed within milliseconds, and a timer for each would cost too much: a member costs an entry
    of a dictionary, and one timer watches the oldest.
    """

    def __init__(self, seconds: float, expired: Callable[[K], None]) -> None:
        """Creates an empty set.

        Args:
            seconds: How long a member may stay. 0 sets no limit.
            expired: Called with each member that stayed longer, after its removal.
        """
        self._seconds = seconds
        self._expired = expired
        # In the order of their moments: a dictionary keeps the order in which keys were added.
        self._since: dict[K, float] = {}
        self._armed = False

    def __len__(self) -> int:
        """Number of members."""
        return len(self._since)

    def __contains__(self, member: K) -> bool:
        """Whether a member is there."""
        return member in self._since

    def __iter__(self) -> Iterator[K]:
        """The members, as they are now."""
        return iter(tuple(self._since))

    def add(self, member: K, call_at: CallAt) -> None:
        """Adds a member. The time of one that is there goes on.

        Args:
            member: The member.
            call_at: Sets the timer, if none is set.
        """
        self._since.setdefault(member, time.monotonic())
        if not self._armed and self._seconds:
            self._arm(call_at)

    def remove(self, member: K) -> bool:
        """Removes a member; returns whether it was there."""
        return self._since.pop(member, None) is not None

    def _arm(self, call_at: CallAt) -> None:
        self._armed = True
        oldest = next(iter(self._since.values()))
        call_at(oldest + self._seconds, lambda: self._check(call_at))

    def _check(self, call_at: CallAt) -> None:
        self._armed = False
        latest = time.monotonic() - self._seconds
        for member, since in tuple(self._since.items()):
            if since > latest:
                break
            self.remove(member)
            self._expired(member)
        if self._since and not self._armed:
            self._arm(call_at)
