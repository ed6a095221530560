"""Threads that decode large requests and encode large replies, away from the thread that takes calls."""

import logging
import threading
from queue import SimpleQueue

from attention_serving.server import thread_names
from attention_serving.server.rpc.transport.seam import Callback

log = logging.getLogger(__name__)
# While one thread waits for the interpreter, another works in NumPy or in the tokenizer. More of them would
# take the interpreter from the thread that takes calls.
THREADS = 2
# The threads are daemons: one that is in the middle of a long text does not delay the end of the process.
JOIN_SECONDS = 1.0


class CodecThreads:
    """A few threads that work in the order in which work arrives.

    A caller of many large requests delays the large requests that arrive after them, and no small ones.
    """

    def __init__(self, count: int = THREADS) -> None:
        """Starts the threads.

        Args:
            count: Number of threads, at least 1.
        """
        self._work: SimpleQueue[Callback | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name="codec", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callback) -> None:
        """Calls a function on one of the threads. May be called on any thread."""
        self._work.put(work)

    def close(self) -> None:
        """Ends the threads after the work that they have taken. Work that has not begun may be dropped."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        thread_names.publish()
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:  # the thread must survive, or no later request would be decoded
                log.exception("codec thread failed")
            del work  # it may hold a message, which must go before the thread waits
