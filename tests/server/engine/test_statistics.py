"""What a model has done: requests by how they ended, and runs by their size."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from attention_serving.server.engine.errors import RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.scheduler import Scheduler
from attention_serving.server.engine.statistics import ModelStatistics
from tests.server.samples import validated_of
from tests.server.seams import FailOnMarked, Held, Recorder, mark, outcome, tapped, withdraw


@pytest.fixture
def model(self_model: LoadedModel) -> LoadedModel:
    return dataclasses.replace(self_model, statistics=ModelStatistics())


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    with closing(Scheduler(Limits(), Recorder(), parallel_runs=1)) as scheduler:
        yield scheduler


def test_results_and_runs_are_counted(model: LoadedModel, scheduler: Scheduler) -> None:
    started = time.time()
    for count in (3, 1):
        request = validated_of(model, [(2, 2)] * count)
        scheduler.submit(request)
        outcome(request)
    found = model.statistics
    assert (found.succeeded.count, found.failed.count, found.queued.count) == (2, 0, 4)
    assert {size: runs.compute.count for size, runs in found.runs.items()} == {3: 1, 1: 1}
    for runs in found.runs.values():
        assert runs.prepare.count == runs.split.count == 1
        assert runs.prepare.seconds >= 0
        assert runs.compute.seconds > 0
    assert found.succeeded.seconds >= sum(runs.compute.seconds for runs in found.runs.values())
    assert started <= found.last_run <= time.time()


def test_a_run_that_fails_fails_its_request_only(model: LoadedModel, scheduler: Scheduler) -> None:
    tap = FailOnMarked()
    failing = tapped(model, tap)
    good, bad = validated_of(failing, [(2, 2)]), validated_of(failing, [(2, 2)], seed=1)
    tap.marks.add(mark(bad))
    for request in (good, bad):
        scheduler.submit(request)
    outcome(good)
    with pytest.raises(RunFailedError):
        outcome(bad)
    found = failing.statistics
    assert (found.succeeded.count, found.failed.count) == (1, 1)


def test_requests_that_are_cancelled_or_expire_count_as_failed(self_model: LoadedModel) -> None:
    with Held(self_model) as held:
        statistics = held.model.statistics
        before = statistics.failed.count
        cancelled = validated_of(held.model, [(2, 2)])
        held.scheduler.submit(cancelled)
        withdraw(held.scheduler, cancelled)
        assert statistics.failed.count == before + 1
        assert statistics.failed.seconds >= 0
