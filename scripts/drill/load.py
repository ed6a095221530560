"""Callers that repeat one request, compare each answer with the first, and record how long it took."""

import threading
import time
from dataclasses import dataclass, field

import numpy as np
from attention_client import AttentionClient, AttentionClientError
from numpy.typing import NDArray

MODEL, ROWS, WIDTH = "multi-head-768x12", 6, 768
CALLERS = 4
# Pause of a caller between two calls, in seconds: the load leaves the servers of one machine idle time.
PAUSE = 0.03
JOIN_SECONDS = 60.0
ATOL = 1e-5


@dataclass(frozen=True)
class Call:
    """One call: when it ended, on the clock of time.monotonic, how long it took in seconds, and its error."""

    ended: float
    seconds: float
    error: str = ""


@dataclass
class Caller:
    """A client and the threads that call with it.

    Attributes:
        name: For the report.
        client: Balances the calls among the servers.
        calls: All calls that have ended.
    """

    name: str
    client: AttentionClient
    calls: list[Call] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begins to call."""
        query = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
        expected = self.client.attend(MODEL, query).context_vectors
        for number in range(CALLERS):
            thread = threading.Thread(
                target=self._repeat, args=(query, expected), name=f"{self.name} {number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ends when the calls in progress have ended.

        Raises:
            TimeoutError: A call did not end.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
            if thread.is_alive():
                raise TimeoutError(f"a call of {thread.name} did not end within {JOIN_SECONDS:g} s")

    def between(self, begin: float, end: float) -> list[Call]:
        """The calls that ended in an interval of time.monotonic."""
        return [call for call in list(self.calls) if begin <= call.ended < end]

    def _repeat(self, query: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        while not self._stop.wait(PAUSE):
            begin = time.monotonic()
            error = self._call(query, expected)
            end = time.monotonic()
            self.calls.append(Call(end, end - begin, error))

    def _call(self, query: NDArray[np.float32], expected: NDArray[np.float32]) -> str:
        """The error of one call; empty if its answer is right."""
        try:
            found = self.client.attend(MODEL, query).context_vectors
        except AttentionClientError as error:
            return f"{type(error).__name__}: {error}"
        return "" if np.allclose(found, expected, rtol=0, atol=ATOL) else "a wrong answer"
