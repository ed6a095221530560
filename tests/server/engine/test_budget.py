"""The memory of requests in flight: bounded, and freed however a request ends."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

import pytest

from attention_serving.server.coroutines import Callback, Task
from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError, OverloadedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.types import Result
from tests.server.samples import assert_answers, bytes_of, request_of, validated_of
from tests.server.seams import PATIENCE_SECONDS, Gate, tapped
from tests.support.coroutines import submitted

THREADS, ROUNDS = 8, 500


def test_the_limit_is_kept_and_released_bytes_are_free() -> None:
    budget = MemoryBudget(10)
    first, second = budget.reserve(4), budget.reserve(6)
    with pytest.raises(OverloadedError, match="would hold 11 bytes; the limit is 10; try again later"):
        budget.reserve(1)
    for _ in range(2):
        first.release()
    assert budget.held_bytes == 6
    second.add(4)
    with pytest.raises(OverloadedError):
        budget.reserve(1)
    second.release()
    assert budget.held_bytes == 0


def test_a_refused_addition_leaves_the_reservation_as_it_was() -> None:
    budget = MemoryBudget(10)
    first, _ = budget.reserve(4), budget.reserve(6)
    with pytest.raises(OverloadedError):
        first.add(1)
    first.release()
    assert budget.held_bytes == 6


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


class HeldEngine(Engine):
    """An engine whose runs wait until its gate is opened."""

    def __init__(self, model: LoadedModel, max_in_flight_bytes: int) -> None:
        self.gate = Gate()
        self.model_held = tapped(model, self.gate)
        limits = Limits(max_in_flight_bytes=max_in_flight_bytes)
        super().__init__(Repository([self.model_held]), limits, parallel_runs=1)

    def close(self) -> None:
        self.gate.open()
        super().close()


@pytest.mark.parametrize("ending", ["result", "cancelled"])
def test_a_request_holds_its_bytes_until_its_future_ends(self_model: LoadedModel, ending: str) -> None:
    size = bytes_of(validated_of(self_model, [(5, 5)]))
    engine = HeldEngine(self_model, 2 * size)
    request = request_of(self_model, [(5, 5)])
    first, second = (submitted(engine, engine.model_held, request) for _ in range(2))
    with pytest.raises(OverloadedError):
        submitted(engine, engine.model_held, request)
    if ending == "result":
        engine.gate.open()
        for future in (first, second):
            future.result(PATIENCE_SECONDS)
        engine.close()
        assert engine.budget.held_bytes == 0
    else:
        second.cancel()
        assert engine.budget.held_bytes == size
        submitted(engine, engine.model_held, request)
        engine.close()


@pytest.mark.parametrize("ending", ["result", "cancelled"])
def test_a_reservation_of_the_caller_is_released_by_the_caller(self_model: LoadedModel, ending: str) -> None:
    engine = HeldEngine(self_model, 1 << 20)
    reservation = engine.budget.reserve(100)
    request = validated_of(engine.model_held, [(5, 5)])
    posted: SimpleQueue[Callback] = SimpleQueue()
    results: list[Result] = []

    async def caller() -> None:
        results.append(await engine.run(request, reservation))

    task = Task(caller(), posted.put)
    task.resume()
    held = 100 + request.form.held_bytes
    assert engine.budget.held_bytes == held
    if ending == "result":
        engine.gate.open()
        posted.get(timeout=PATIENCE_SECONDS)()
        assert_answers(request, results[0])
    else:
        task.close()
        assert request.is_done
        assert results == []
    engine.close()
    assert task.is_closed
    assert engine.budget.held_bytes == held
    reservation.release()
    assert engine.budget.held_bytes == 0


def test_a_refused_request_holds_nothing(self_model: LoadedModel) -> None:
    engine = HeldEngine(self_model, 1 << 20)
    engine.close()
    with pytest.raises(EngineError, match="shutting down"):
        submitted(engine, engine.model_held, request_of(self_model, [(5, 5)]))
    assert engine.budget.held_bytes == 0


def test_cancelled_requests_do_not_stay_in_memory(self_model: LoadedModel) -> None:
    engine = HeldEngine(self_model, 4 * bytes_of(validated_of(self_model, [(5, 5)])))
    references = []
    submitted(engine, engine.model_held, request_of(self_model, [(1, 1)]))
    assert engine.gate.entered.wait(PATIENCE_SECONDS)
    for seed in range(20):
        request = request_of(self_model, [(5, 5)], seed=seed)
        references.append(weakref.ref(request.inputs["query"].rows))
        with suppress(OverloadedError):
            submitted(engine, engine.model_held, request).cancel()
        del request
    gc.collect()
    assert not any(reference() is not None for reference in references)
    engine.close()


def test_a_reservation_is_released_only_by_its_own_release() -> None:
    budget = MemoryBudget(10)
    Reservation(budget).release()
    assert budget.held_bytes == 0
