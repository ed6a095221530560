"""The end of a request: one outcome, of which whoever waits is told once; and memory that is freed."""

import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from attention_serving.server.coroutines import Callback, Task
from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError, OverloadedError, RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.validated_request import ValidatedRequest
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.types import Array, MaskKind, Result
from tests.server.samples import Sample, request_of, validated_of
from tests.server.seams import MESSAGE, PATIENCE_SECONDS, Gate, Tap, tapped, wait, wait_until

ROUNDS = 300


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("outcome", [Result({}), RunFailedError(MESSAGE)], ids=["result", "error"])
def test_whoever_waits_is_told_once_and_takes_the_outcome_once(
    self_model: LoadedModel, outcome: Result | EngineError, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    request = validated_of(self_model, [(2, 2)])
    told: list[object] = []

    def take() -> None:
        try:
            told.append(request.result())
        except EngineError as error:
            told.append(error)
        raise RuntimeError(MESSAGE)  # others must not notice

    with pytest.raises(ValueError, match="has not ended"):
        request.result()
    if order == "before":
        wait(request, take)
        assert told == []
    request.end(outcome)
    if order == "after":
        wait(request, take)
    assert told == [outcome]
    assert caplog.text.count("callback failed") == 1
    with pytest.raises(ValueError, match="was taken"):
        request.result()


def test_whichever_thread_comes_first_whoever_waits_is_told_once(self_model: LoadedModel) -> None:
    requests = [validated_of(self_model, [(1, 1)]) for _ in range(ROUNDS)]
    told: list[int] = []
    together = threading.Barrier(2)

    def ends() -> None:
        for request in requests:
            together.wait(PATIENCE_SECONDS)
            request.end(Result({}))

    def waits() -> None:
        for number, request in enumerate(requests):
            together.wait(PATIENCE_SECONDS)
            wait(request, partial(told.append, number))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(ends), pool.submit(waits)]:
            done.result(PATIENCE_SECONDS)
    assert sorted(told) == list(range(ROUNDS))


def test_nobody_is_told_of_a_request_that_was_withdrawn(self_model: LoadedModel) -> None:
    request = validated_of(self_model, [(2, 2)])
    told: list[object] = []
    wait(request, lambda: told.append("before"))
    request.end(None)
    wait(request, lambda: told.append("after"))
    assert told == []


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Also without records of the log, which keep the frames of a failed run."""
    gc.collect()
    gc.disable()
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


class Watch(dict[str, "weakref.ref[Any]"]):
    """What is to be freed."""

    def add(self, name: str, watched: object) -> None:
        self[name] = weakref.ref(watched)

    def assert_freed(self, *names: str) -> None:
        """All that is watched is freed: a thread lets go of it before it waits."""
        assert sorted(self) == sorted(names)
        wait_until(lambda: all(reference() is None for reference in self.values()))


ASKED = ("request", "query", "key", "value", "mask")
OUTPUTS = ("context_vectors", "attention_weights")


class Asked:
    """A coroutine whose request is watched, driven by the thread of the test, which may run batches too."""

    def __init__(
        self, engine: Engine, model: LoadedModel, *, inline: bool = False, deadline: float = math.inf
    ) -> None:
        self.engine, self.watch, self.inline = engine, Watch(), inline
        self._posted: SimpleQueue[Callback] = SimpleQueue()
        self.ended = ""
        if inline:
            engine.run_inline(math.inf)
        self.task = Task(self._work(self._request(model, deadline)), self._posted.put)
        self.task.resume()

    def _request(self, model: LoadedModel, deadline: float) -> ValidatedRequest:
        request = request_of(
            model, [(2, 3), (5, 4)], kind=MaskKind.PAIRS, return_weights=True, deadline=deadline
        )
        assert request.mask is not None
        for name, own in request.inputs.items():
            self.watch.add(name, own.rows)
        self.watch.add("mask", request.mask.data)
        validated = Sample(validate(request, model, self.engine.limits))
        del validated.asked
        self.watch.add("request", validated)
        return validated

    async def _work(self, request: ValidatedRequest) -> None:
        reservation = self.engine.budget.reserve(0)
        try:
            result = await self.engine.run(request, reservation)
            for name, arrays in result.outputs.items():
                self.watch.add(name, arrays[0])
            self.ended = "answered"
        except EngineError as error:
            self.ended = type(error).__name__
        finally:
            reservation.release()

    def wait(self) -> str:
        """Drives the coroutine to its end; returns how it ended."""
        while not self.ended:
            if not (self.inline and self.engine.run_inline(math.inf)):
                self._posted.get(timeout=PATIENCE_SECONDS)()
        return self.ended


def one_by_one(model: LoadedModel) -> "closing[Engine]":
    """An engine that runs every sequence by itself, one after the other."""
    return closing(Engine(Repository([model]), Limits(max_batch_sequences=1), parallel_runs=1))


def failing_second() -> Tap:
    runs: list[int] = []

    def tap(_: dict[str, Array]) -> None:
        runs.append(1)
        if len(runs) == 2:
            raise RuntimeError(MESSAGE)

    return tap


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("inline", [False, True], ids=["on a thread", "inline"])
@pytest.mark.parametrize("end", ["answered", "RunFailedError", "DeadlineExceededError", "ShuttingDownError"])
def test_a_request_that_has_ended_is_freed(cross_model: LoadedModel, end: str, *, inline: bool) -> None:
    model = tapped(cross_model, failing_second()) if end == "RunFailedError" else cross_model
    deadline = time.monotonic() if end == "DeadlineExceededError" else math.inf
    with one_by_one(cross_model) as engine:
        if end == "ShuttingDownError":
            engine.close()
        asked = Asked(engine, model, inline=inline, deadline=deadline)
        assert asked.wait() == end
        asked.watch.assert_freed(*ASKED, *(OUTPUTS if end == "answered" else ()))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("place", ["queued", "running"])
def test_a_request_that_is_withdrawn_is_freed(cross_model: LoadedModel, place: str) -> None:
    """From the queue, during the run of another; or after its own run."""
    gate = Gate()
    with one_by_one(cross_model) as engine:
        held = Asked(engine, tapped(cross_model, gate))
        assert gate.entered.wait(PATIENCE_SECONDS)
        asked = Asked(engine, cross_model) if place == "queued" else held
        asked.task.close()
        if place == "running":
            gate.open()
        asked.watch.assert_freed(*ASKED)
        gate.open()
        assert asked is held or held.wait() == "answered"


THREADS, ROUNDS = 8, 500


def test_the_limit_is_kept_and_released_bytes_are_free() -> None:
    budget = MemoryBudget(10)
    first, second = budget.reserve(4), budget.reserve(6)
    with pytest.raises(OverloadedError, match="would hold 11 bytes; the limit is 10; try again later"):
        budget.reserve(1)
    for _ in range(2):
        first.release()
    assert budget.held_bytes == 6
    third = budget.reserve(3)
    with pytest.raises(OverloadedError):
        third.add(2)
    second.release()
    third.release()
    assert budget.held_bytes == 0


def test_a_reservation_beyond_the_limit_is_granted_if_nothing_else_is_reserved() -> None:
    budget = MemoryBudget(10)
    reservation = budget.reserve(8)
    reservation.add(8)
    assert budget.held_bytes == 16
    with pytest.raises(OverloadedError):
        budget.reserve(1)


def test_reservations_of_many_threads_add_up() -> None:
    budget = MemoryBudget(THREADS * 3)
    together = threading.Barrier(THREADS)

    def reserve_and_release(_: int) -> None:
        together.wait()
        for _ in range(ROUNDS):
            reservation = budget.reserve(1)
            reservation.add(2)
            reservation.release()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(reserve_and_release, range(THREADS)))
    assert budget.held_bytes == 0


class ReadTogether(Reservation):
    """A reservation whose size two threads read before either goes on, unless something keeps one away."""

    together: threading.Barrier

    @property
    def size(self) -> int:
        size = self.kept
        if threading.current_thread() is not threading.main_thread():
            with suppress(threading.BrokenBarrierError):
                self.together.wait(0.1)
        return size

    @size.setter
    def size(self, size: int) -> None:
        self.kept = size


def test_a_reservation_that_two_threads_release_is_released_once() -> None:
    budget = MemoryBudget(10)
    other, reservation = budget.reserve(3), ReadTogether(budget)
    reservation.add(4)
    reservation.together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(reservation.release) for _ in range(2)]:
            done.result()
    assert budget.held_bytes == other.size
