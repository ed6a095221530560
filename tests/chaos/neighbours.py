"""A small good request that is sent again and again beside what a case does to a server."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

PERIOD_SECONDS = 0.01


class Neighbour:
    """Makes a call every 10 ms until `stop`, and keeps the times to the answers."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._stopping = False
        self._pool = ThreadPoolExecutor(1)
        self._seconds = self._pool.submit(self._run)

    def _run(self) -> list[float]:
        seconds = []
        while not self._stopping:
            started = time.perf_counter()
            self._call()
            seconds.append(time.perf_counter() - started)
            time.sleep(max(0.0, PERIOD_SECONDS - seconds[-1]))
        return seconds

    def stop(self) -> list[float]:
        """Ends the calls; returns the seconds of each."""
        self._stopping = True
        self._pool.shutdown()
        return self._seconds.result()
