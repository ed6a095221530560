"""Drives the coroutines of the server in tests, and reserves their memory, where no transport does."""

from collections.abc import Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from attention_serving.server.coroutines import Callback, Task, Wait
from attention_serving.server.engine.budget import Account, MemoryBudget, Reservation
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import DecodedRequest, Result

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


def reserve(budget: MemoryBudget, size: int = 0, account: Account | None = None) -> Reservation:
    """The reservation of a new request."""
    reservation = Reservation(budget, account)
    reservation.add(size)
    return reservation


def submitted(engine: Engine, model: LoadedModel, request: DecodedRequest) -> "Future[Result]":
    """Queues a request as a call does, and raises its refusal. Cancelling the future withdraws it."""
    validated = engine.validate(model, request)
    reservation = reserve(engine.budget, sum(ragged.rows.nbytes for ragged in request.inputs.values()))
    future: Future[Result] = Future()

    async def work() -> None:
        with suppress(InvalidStateError):  # it was cancelled
            try:
                try:
                    result = await engine.submit_and_wait(validated, reservation)
                finally:
                    reservation.release()
            except EngineError as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    task = Task(work(), lambda callback: callback())
    task.resume()
    if future.done():
        future.result()
    future.add_done_callback(lambda ended: task.close() if ended.cancelled() else None)
    return future
