"""The end of a request: one outcome, of which whoever waits is told once; and memory that is freed."""

import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from attention_serving.server.coroutines import Task
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError, OverloadedError, RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validated_request import ValidatedRequest
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.types import Array, MaskKind, Result
from tests.server.samples import request_of, validated_of
from tests.server.seams import MESSAGE, PATIENCE_SECONDS, Gate, engine_of, tapped, wait, wait_until

ROUNDS = 300


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    "outcome", [Result({}), RunFailedError(MESSAGE), None], ids=["result", "error", "withdrawn"]
)
def test_whoever_waits_is_told_once_and_takes_the_outcome_once(
    self_model: LoadedModel,
    outcome: Result | EngineError | None,
    order: str,
    caplog: pytest.LogCaptureFixture,
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
    assert told == ([] if outcome is None else [outcome])
    assert caplog.text.count("callback failed") == len(told)
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


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Also without records of the log, which keep the frames of a failed run."""
    gc.collect()
    gc.disable()
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


class Asked:
    """A coroutine that awaits a result, and references to all that is to be freed when it has ended."""

    def __init__(self, engine: Engine, model: LoadedModel, deadline: float = math.inf) -> None:
        self.ended: SimpleQueue[str] = SimpleQueue()
        self._watched: list[weakref.ref[Any]] = []
        self.task = Task(self._work(engine, self._request(model, deadline)), lambda callback: callback())
        self.task.resume()

    def _request(self, model: LoadedModel, deadline: float) -> ValidatedRequest:
        lengths, kind = [(2, 3), (5, 4)], MaskKind.PAIRS
        request = request_of(model, lengths, kind=kind, return_weights=True, deadline=deadline)
        assert request.mask is not None
        validated = validate(request, model, Limits())
        arrays = [own.rows for own in request.inputs.values()]
        self._watched += map(weakref.ref, (validated, request.mask.data, *arrays))
        return validated

    async def _work(self, engine: Engine, request: ValidatedRequest) -> None:
        try:
            result = await engine.run(request, engine.budget.reserve(0))
            self._watched += [weakref.ref(arrays[0]) for arrays in result.outputs.values()]
            self.ended.put("answered")
        except EngineError as error:
            self.ended.put(type(error).__name__)

    def assert_freed(self) -> None:
        """A thread lets go of it before it waits."""
        wait_until(lambda: all(reference() is None for reference in self._watched))


@pytest.fixture
def one_by_one() -> Iterator[Engine]:
    """An engine that runs every sequence by itself, one after the other."""
    with closing(engine_of(Limits(max_batch_sequences=1), parallel_runs=1)) as engine:
        yield engine


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("inline", [False, True], ids=["on a thread", "inline"])
@pytest.mark.parametrize("end", ["answered", "RunFailedError", "DeadlineExceededError", "ShuttingDownError"])
def test_a_request_that_has_ended_is_freed(
    cross_model: LoadedModel, one_by_one: Engine, end: str, *, inline: bool
) -> None:
    runs: list[int] = []

    def fail_second(inputs: dict[str, Array]) -> None:
        runs.append(len(inputs))
        if end == "RunFailedError" and len(runs) > 1:
            raise RuntimeError(MESSAGE)

    if end == "ShuttingDownError":
        one_by_one.close()
    if inline:
        one_by_one.run_inline(math.inf)
    deadline = time.monotonic() if end == "DeadlineExceededError" else math.inf
    asked = Asked(one_by_one, tapped(cross_model, fail_second), deadline)
    while inline and one_by_one.run_inline(math.inf):
        pass
    assert asked.ended.get(timeout=PATIENCE_SECONDS) == end
    asked.assert_freed()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("place", ["queued", "running"])
def test_a_request_that_is_withdrawn_is_freed(
    cross_model: LoadedModel, one_by_one: Engine, place: str
) -> None:
    """From the queue, during the run of another; or after its own run."""
    gate = Gate()
    held = Asked(one_by_one, tapped(cross_model, gate))
    assert gate.entered.wait(PATIENCE_SECONDS)
    asked = Asked(one_by_one, cross_model) if place == "queued" else held
    asked.task.close()
    if place == "running":
        gate.open()
    asked.assert_freed()
    gate.open()
    assert asked is held or held.ended.get(timeout=PATIENCE_SECONDS) == "answered"


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
