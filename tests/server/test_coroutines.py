"""Tasks: what a coroutine awaits may fail before anything happens."""

from collections.abc import Callable
from typing import NoReturn

import pytest

from attention_serving.server.coroutines import Callback, Task, suspend

FAILURE = RuntimeError("cannot schedule new futures after shutdown")


def run_at_once(callback: Callback) -> None:
    callback()


def fail(task: Task) -> NoReturn:
    task.hold()
    raise FAILURE


def resume_and_fail(task: Task) -> NoReturn:
    task.resume()
    raise FAILURE


def test_a_wait_that_fails_raises_where_the_coroutine_awaits_it() -> None:
    raised: list[Exception] = []
    waiting: list[Task] = []

    async def work() -> None:
        for _ in range(2):
            try:
                await suspend(fail)
            except RuntimeError as error:
                raised.append(error)
        try:
            await suspend(waiting.append)
        finally:
            raised.append(ValueError("closed"))

    task = Task(work(), run_at_once)
    task.resume()
    assert raised == [FAILURE, FAILURE]
    assert waiting == [task]
    task.close()  # at once: no other thread works for it
    assert len(raised) == 3


@pytest.mark.parametrize("wait", [fail, resume_and_fail])
def test_an_error_that_no_coroutine_handles_reaches_the_caller(wait: Callable[[Task], NoReturn]) -> None:
    async def work() -> None:
        await suspend(wait)

    task = Task(work(), run_at_once)
    with pytest.raises(RuntimeError) as caught:
        task.resume()
    assert caught.value is FAILURE
    assert task.is_closed
