"""Threads that decode large requests and encode large replies, away from the thread that takes calls."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
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

    async def run_all(self, functions: Iterator[Callable[[], object]], deadline: float) -> None:
        """Calls functions, one on each thread at a time. In between, the threads do the work that waits.

        The iterator is advanced on the threads, one call at a time.

        Args:
            functions: The functions. None is called after one that raises.
            deadline: When the caller stops waiting, on `time.monotonic`'s clock.

        Raises:
            DeadlineExceededError: The deadline passed before the last function was called.
        """
        (await suspend(partial(self._submit_all, functions, deadline))).result()

    def _submit_all(self, functions: Iterator[Callable[[], object]], deadline: float, task: Task) -> None:
        task.defer_close()
        outcome, errors, lock, busy = Future[None](), list[Exception](), Lock(), THREADS
        outcome.add_done_callback(task.wake)

        def call_next() -> bool:
            with lock:
                function = None if errors or task.is_closed else next(functions, None)
            if function is None:
                return False
            if time.monotonic() > deadline:
                raise DeadlineExceededError(TOO_LATE)
            function()
            return True

        def go_on(future: Future[bool] | None) -> None:
            nonlocal busy
            try:
                if future is None or future.result():
                    self._executor.submit(call_next).add_done_callback(go_on)
                    return
            except Exception as error:
                errors.append(error)
            with lock:
                busy -= 1
                is_last = not busy
            if is_last and errors:
                outcome.set_exception(errors[0])
            elif is_last:
                outcome.set_result(None)

        for _ in range(THREADS):
            go_on(None)

    def close(self) -> None:
        """Ends the threads. Work that has not begun is dropped; a long text is not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)
