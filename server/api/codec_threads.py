"""Threads that decode large requests and encode large replies, away from the thread that takes calls."""

import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from attention_serving.server.coroutines import Task, suspend
from attention_serving.server.engine.errors import DeadlineExceededError

T = TypeVar("T")
# While one thread waits for the interpreter, another works in NumPy or in the tokenizer. More of them would
# take the interpreter from the thread that takes calls.
THREADS = 2
TOO_LATE = "the deadline passed while the request waited for a codec thread"


class CodecThreads:
    """A few threads that work in the order in which work arrives.

    A caller of many large requests delays the large requests that arrive after them, and no small ones.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        """Creates the threads.

        Args:
            executor: Does the work; None for threads of its own.
        """
        self._executor = executor or ThreadPoolExecutor(THREADS, "codec")

    async def run(self, function: Callable[[], T], deadline: float) -> T:
        """Calls a function on one of the threads, and returns or raises what it does.

        Args:
            function: The function.
            deadline: When its caller stops waiting, on `time.monotonic`'s clock.

        Raises:
            DeadlineExceededError: The deadline had passed when its turn came.
        """
        result: T = (await suspend(partial(self._submit, function, deadline))).result()
        return result

    def _submit(self, function: Callable[[], object], deadline: float, task: Task) -> None:
        task.defer_close()  # what the thread works on stays until it is done, even if the call ends

        def work() -> object:
            if time.monotonic() > deadline:
                raise DeadlineExceededError(TOO_LATE)
            return None if task.is_closed else function()  # work for a call that has ended is dropped

        self._executor.submit(work).add_done_callback(task.wake)

    def close(self) -> None:
        """Ends the threads. Work that has not begun is dropped; a long text is not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)
