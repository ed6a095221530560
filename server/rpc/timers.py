"""What is to be done at a moment, unless it is called off before."""

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable

# Entries of callbacks that were called off are swept out when they are this many more than half.
SPARE = 64
# Without a deadline gRPC's core reports centuries.
FOREVER_SECONDS = 365 * 24 * 3600.0


def after(seconds: float) -> float:
    """The moment so many seconds from now, on `time.monotonic`'s clock; infinite for ages."""
    return math.inf if seconds > FOREVER_SECONDS else time.monotonic() + seconds


class Timers:
    """Callbacks by the moment when they are due."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, tuple[float, Callable[[], object]]] = {}
        self._heap: list[tuple[float, int]] = []
        self._numbers = itertools.count()

    @property
    def next_due(self) -> float:
        """When the next callback is due; infinite where there is none."""
        with self._lock:
            return self._heap[0][0] if self._heap else math.inf

    def add(self, due: float, callback: Callable[[], object]) -> int:
        """Calls back at a moment, on `time.monotonic`'s clock. Returns a number to call it off by."""
        with self._lock:
            number = next(self._numbers)
            self._callbacks[number] = (due, callback)
            heapq.heappush(self._heap, (due, number))
        return number

    def call_off(self, number: int) -> None:
        """Forgets a callback; does nothing where it was called."""
        with self._lock:
            self._callbacks.pop(number, None)
            if len(self._heap) > 2 * len(self._callbacks) + SPARE:
                self._heap = [(due, number) for number, (due, _) in self._callbacks.items()]
                heapq.heapify(self._heap)

    def run_due(self, now: float) -> None:
        """Calls back what is due."""
        due = []
        with self._lock:
            while self._heap and self._heap[0][0] <= now:
                _, number = heapq.heappop(self._heap)
                if found := self._callbacks.pop(number, None):
                    due.append(found[1])
        for callback in due:
            callback()
