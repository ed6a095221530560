"""What a model has done: requests by how they ended, and runs by their size."""

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.statistics import (
    MOST_WAITING,
    BatchReport,
    Durations,
    ModelStatistics,
    RunTimes,
)
from tests.server.samples import validated_of
from tests.server.seams import FailOnMarked, Held, Recorder, engine_of, mark, outcome, tapped, withdraw

THREADS = 4


@pytest.fixture
def model(self_model: LoadedModel) -> LoadedModel:
    return dataclasses.replace(self_model, statistics=ModelStatistics())


@pytest.fixture
def engine() -> Iterator[Engine]:
    with closing(engine_of(Limits(), Recorder(), parallel_runs=1)) as engine:
        yield engine


def test_results_and_runs_are_counted(model: LoadedModel, engine: Engine) -> None:
    started = time.time()
    for count in (3, 1):
        request = validated_of(model, [(2, 2)] * count)
        engine.submit(request)
        outcome(request)
    found = model.statistics
    found.fold()
    assert (found.succeeded.count, found.failed.count, found.queued.count) == (2, 0, 4)
    assert {size: runs.compute.count for size, runs in found.runs.items()} == {3: 1, 1: 1}
    for runs in found.runs.values():
        assert runs.prepare.count == runs.split.count == 1
        assert runs.prepare.seconds >= 0
        assert runs.compute.seconds > 0
    assert found.succeeded.seconds >= sum(runs.compute.seconds for runs in found.runs.values())
    assert started <= found.last_run <= time.time()


def test_a_run_that_fails_fails_its_request_only(model: LoadedModel, engine: Engine) -> None:
    tap = FailOnMarked()
    failing = tapped(model, tap)
    good, bad = validated_of(failing, [(2, 2)]), validated_of(failing, [(2, 2)], seed=1)
    tap.marks.add(mark(bad))
    for request in (good, bad):
        engine.submit(request)
    outcome(good)
    with pytest.raises(RunFailedError):
        outcome(bad)
    found = failing.statistics
    found.fold()
    assert (found.succeeded.count, found.failed.count) == (1, 1)


def test_requests_that_are_cancelled_or_expire_count_as_failed(self_model: LoadedModel) -> None:
    with Held(self_model) as held:
        statistics = held.model.statistics
        before = statistics.failed.count
        cancelled = validated_of(held.model, [(2, 2)])
        held.engine.submit(cancelled)
        withdraw(held.engine, cancelled)
        assert statistics.failed.count == before + 1
        assert statistics.failed.seconds >= 0


def test_what_waits_to_be_counted_is_bounded_and_nothing_is_lost() -> None:
    found = ModelStatistics()

    def add(size: int) -> None:
        for _ in range(MOST_WAITING):
            found.add_run(BatchReport("m", 0, 0, [0.5] * size, RunTimes(1.0, 2.0, 3.0), [0.25] * size))
            found.add_failure(4.0)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(add, range(1, THREADS + 1)))
    total = MOST_WAITING * sum(range(1, THREADS + 1))
    assert total - found.succeeded.count <= (MOST_WAITING + THREADS) * THREADS
    assert THREADS * MOST_WAITING - sum(runs.compute.count for runs in found.runs.values()) <= (
        MOST_WAITING + THREADS
    )
    found.fold()
    assert found.succeeded == Durations(total, 0.25 * total)
    assert found.queued == Durations(total, 0.5 * total)
    assert found.failed == Durations(THREADS * MOST_WAITING, 4.0 * THREADS * MOST_WAITING)
    parts = [Durations(MOST_WAITING, seconds * MOST_WAITING) for seconds in (1.0, 2.0, 3.0)]
    assert {
        size: [runs.prepare, runs.compute, runs.split] for size, runs in found.runs.items()
    } == dict.fromkeys(range(1, THREADS + 1), parts)
