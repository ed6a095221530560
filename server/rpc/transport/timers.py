"""Timers: callbacks that run at a given moment unless they are cancelled."""

import heapq
import itertools
import logging
import math
from collections.abc import Callable

log = logging.getLogger(__name__)
# Entries of cancelled callbacks are removed when they are this many more than half of all entries.
SPARE = 64


class Timers:
    """Callbacks by the moment when they are due, on `time.monotonic`'s clock. For the transport's thread."""

    def __init__(self) -> None:
        self._callbacks: dict[int, tuple[float, Callable[[], object]]] = {}
        self._heap: list[tuple[float, int]] = []
        self._numbers = itertools.count()

    @property
    def next_due(self) -> float:
        """When the next callback is due; infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, due: float, callback: Callable[[], object]) -> int:
        """Adds a callback. Returns the number to cancel it by."""
        number = next(self._numbers)
        self._callbacks[number] = (due, callback)
        heapq.heappush(self._heap, (due, number))
        return number

    def cancel(self, number: int) -> None:
        """Removes a callback. Does nothing if it was called or removed before."""
        self._callbacks.pop(number, None)
        if len(self._heap) > 2 * len(self._callbacks) + SPARE:
            self._heap = [(due, number) for number, (due, _) in self._callbacks.items()]
            heapq.heapify(self._heap)

    def run_due(self, now: float) -> None:
        """Calls every callback that is due, in order of their moments."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            _, number = heapq.heappop(self._heap)
            if found := self._callbacks.pop(number, None):
                due.append(found[1])
        for callback in due:
            try:
                callback()
            except Exception:  # the failure of one call must not affect the others
                log.exception("timer failed")
