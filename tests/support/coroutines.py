"""Drives the coroutines of the server in tests, where no transport does."""

from collections.abc import Coroutine
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from attention_serving.server.coroutines import Callback, Task, Wait

T = TypeVar("T")
PATIENCE_SECONDS = 60


def run(work: Coroutine[Wait, Any, T]) -> T:
    """What a coroutine returns or raises. It runs on this thread; what it awaits may come from others."""
    posted: SimpleQueue[Callback] = SimpleQueue()
    ended: Future[T] = Future()

    async def whole() -> None:
        try:
            ended.set_result(await work)
        except BaseException as error:
            ended.set_exception(error)
            if not isinstance(error, Exception):
                raise

    Task(whole(), posted.put).resume()
    while not ended.done():
        posted.get(timeout=PATIENCE_SECONDS)()
    return ended.result()
