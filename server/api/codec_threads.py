"""Threads that decode large requests and encode large replies, away from the thread that takes calls."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from attention_serving.server.coroutines import Task, suspend
from attention_serving.server.engine.errors import DeadlineExceededError
from attention_serving.server.threads import publish_name

log = logging.getLogger(__name__)
T = TypeVar("T")
# While one thread waits for the interpreter, another works in NumPy or in the tokenizer. More of them would
# take the interpreter from the thread that takes calls.
THREADS = 2
# The threads are daemons: one that is in the middle of a long text does not delay the end of the process.
JOIN_SECONDS = 1.0
TOO_LATE = "the deadline passed while the request waited for a codec thread"


class CodecThreads:
    """A few threads that work in the order in which work arrives.

    A caller of many large requests delays the large requests that arrive after them, and no small ones.
    """

    def __init__(self, count: int = THREADS) -> None:
        """Starts the threads.

        Args:
            count: Number of threads, at least 1.
        """
        self._queue: SimpleQueue[tuple[Task, Callable[[], Any], float] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name="codec", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    async def run(self, function: Callable[[], T], deadline: float) -> T:
        """Calls a function on one of the threads, and returns or raises what it does.

        Args:
            function: The function.
            deadline: When its caller stops waiting, on `time.monotonic`'s clock.

        Raises:
            DeadlineExceededError: The deadline had passed when its turn came.
        """
        result: T
        error: BaseException | None
        result, error = await suspend(partial(self._put, function, deadline))
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # it refers to frames that refer to it: neither may keep the other alive

    def _put(self, function: Callable[[], object], deadline: float, task: Task) -> None:
        task.hold()  # what the thread works on stays until it is done, even if the call ends
        self._queue.put((task, function, deadline))

    def close(self) -> None:
        """Ends the threads after the work that they have taken. Work that has not begun may be dropped."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        publish_name()
        while (work := self._queue.get()) is not None:
            task, function, deadline = work
            result, error = None, cast("BaseException | None", None)
            try:
                if time.monotonic() > deadline:
                    error = DeadlineExceededError(TOO_LATE)
                elif not task.is_closed:  # work for a call that has ended is dropped
                    result = function()
            except BaseException as raised:
                error = raised
            task.wake((result, error))
            del work, task, function, result, error  # what they hold must go before the thread waits
