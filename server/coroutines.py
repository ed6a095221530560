"""Coroutines that one thread drives, each until it awaits something. There is no event loop and no asyncio.

An awaitable yields a `Wait`: a function that registers the task, to be resumed exactly once. None means that
other code will resume it.
"""

from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from functools import partial
from types import coroutine
from typing import Any, TypeAlias, TypeVar

# No bound: futures of any result.
T = TypeVar("T")

Callback: TypeAlias = Callable[[], object]
# Runs a callback on the thread that drives the coroutines: at once if that is the calling thread.
Post: TypeAlias = Callable[[Callback], object]
Wait: TypeAlias = "Callable[[Task], object] | None"


class Task:
    """A coroutine that is under way. All methods but `wake` belong to the thread that drives it.

    Attributes:
        is_closed: Whether its result is no longer needed. For any thread.
    """

    is_closed = _defers_close = False
    _coroutine: Coroutine[Wait, Any, Any]

    def __init__(self, work: Coroutine[Wait, Any, Any], post: Post) -> None:
        """Creates a task that `resume` starts.

        Args:
            work: What it does. It handles its errors itself.
            post: Runs callbacks on the thread that drives the task.
        """
        self._coroutine, self._post = work, post

    def post(self, callback: Callback) -> None:
        """Calls back on the thread that drives the task: at once if that is the calling thread."""
        self._post(callback)

    def resume(self, value: object = None) -> None:
        """Runs the coroutine until it awaits something that has not happened, which then gets the task.

        Args:
            value: What was awaited.
        """
        if self.is_closed:
            if self._defers_close:  # `close` was deferred
                self._defers_close = False
                self._coroutine.close()
            return
        step: Callable[[Any], Wait] = self._coroutine.send
        while True:
            self._defers_close = False
            try:
                wait = step(value)
            except StopIteration:
                self.is_closed = True
                return
            except BaseException:
                self.is_closed = True
                raise
            if wait is None:
                return
            try:
                wait(self)
            except Exception as error:
                if self.is_closed:  # what it waited for had happened
                    raise
                # The coroutine would wait for ever.
                step, value = self._coroutine.throw, error
            else:
                return

    def wake(self, value: object = None) -> None:
        """Resumes the coroutine on its thread. For any thread."""
        self.post(self.resume if value is None else partial(self.resume, value))

    def defer_close(self) -> None:
        """Defers `close` until the task is resumed, because another thread uses its data."""
        self._defers_close = True

    def close(self) -> None:
        """Ends the coroutine where it is, which runs its `finally` blocks. Does nothing if it has ended."""
        self.is_closed = True
        if not self._defers_close:
            self._coroutine.close()


@coroutine
def suspend(wait: Wait) -> Generator[Wait, Any, Any]:
    """Waits; returns what the task is resumed with."""
    return (yield wait)


def _wake_with_result(future: "Future[Any]", task: Task) -> None:
    future.add_done_callback(lambda _: task.wake())


async def result_of(future: "Future[T]") -> T:
    """What a future resolves with, on any thread. If the coroutine is closed, the future is cancelled."""
    try:
        await suspend(partial(_wake_with_result, future))
        return future.result()
    finally:
        future.cancel()  # does nothing if it has resolved
        del future  # it refers to its error, which refers to this frame
