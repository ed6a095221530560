"""Errors outside a run neither end the scheduler's threads nor leave a request waiting forever."""

import dataclasses
from collections.abc import Iterator
from typing import NoReturn

import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine import batch_queue
from attention_serving.server.engine.run_memory import LARGE_RUN_BYTES
from attention_serving.server.engine.errors import RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run_memory import LARGE_RUN_BYTES
from attention_serving.server.engine.scheduler import Scheduler
from tests.server.samples import assert_answers, validated_of
from tests.server.seams import MESSAGE, SAME_FOR_ALL, Recorder, costing, outcome


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(Limits(), Recorder(), parallel_runs=2)
    yield scheduler
    scheduler.close()


class BrokenTrim(LoadedModel):
    """A model whose runs count as large and whose arena cannot be trimmed."""

    def run_bytes(self, graph: GraphKind, batch: int, query_length: int, key_length: int) -> int:
        return LARGE_RUN_BYTES + super().run_bytes(graph, batch, query_length, key_length)

    def shrink_arena(self) -> None:
        raise RuntimeError(MESSAGE)


def broken(*_: object) -> NoReturn:
    """In place of what plans a batch or delivers its results."""
    raise RuntimeError(MESSAGE)


def as_type(kind: type[LoadedModel], model: LoadedModel) -> LoadedModel:
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return kind(**fields)


def assert_still_runs(scheduler: Scheduler, model: LoadedModel) -> None:
    """Every thread of the scheduler still takes requests."""
    requests = [validated_of(model, [(2, 2)], seed=seed) for seed in range(4)]
    for request in requests:
        scheduler.submit(request)
        assert_answers(request, outcome(request))


def test_threads_survive_an_arena_that_cannot_be_trimmed(
    self_model: LoadedModel, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention_serving.server.engine.run_memory.IDLE_SECONDS", 0.0)
    broken = as_type(BrokenTrim, self_model)
    for seed in range(4):
        request = validated_of(broken, [(2, 2)], seed=seed)
        scheduler.submit(request)
        assert_answers(request, outcome(request))
    assert_still_runs(scheduler, self_model)


def test_a_batch_that_cannot_be_planned_fails_its_requests(
    self_model: LoadedModel, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(batch_queue, "Batch", broken)
        for _ in range(3):
            request = validated_of(self_model, [(2, 2)])
            scheduler.submit(request)
            with pytest.raises(RunFailedError):
                outcome(request)
    assert_still_runs(scheduler, self_model)


def test_a_batch_that_cannot_be_planned_inline_fails_its_requests(
    self_model: LoadedModel, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(batch_queue, "Batch", broken)
        request = validated_of(self_model, [(2, 2)])
        scheduler.submit(request, wake=False)
        assert not scheduler.run_inline(1.0)
        with pytest.raises(RunFailedError):
            outcome(request)
    assert_still_runs(scheduler, self_model)


def test_results_that_cannot_be_delivered_fail_their_requests(
    self_model: LoadedModel, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = costing(self_model, SAME_FOR_ALL)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_deliver", broken)
        request = validated_of(model, [(2, 2), (3, 3)])
        scheduler.submit(request)
        with pytest.raises(RunFailedError):
            outcome(request)
    assert_still_runs(scheduler, self_model)


@pytest.mark.parametrize("failing", [0, 1], ids=["the first", "the last"])
def test_a_result_that_cannot_be_made_fails_its_own_request_only(
    self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The request has left the queue when its result is made of the outputs of its runs."""
    made: list[object] = []

    def gather(results: list[Outputs]) -> Outputs:
        made.append(results)
        if len(made) == failing + 2:  # the first one is that of the held run
            raise RuntimeError(MESSAGE)
        return execute.gather(results)

    monkeypatch.setattr(scheduler_module, "gather", gather)
    with Held(self_model) as held:
        requests = [held.submit([(2, 2)], seed=seed) for seed in range(2)]
        monkeypatch
    broken, good = requests[failing], requests[1 - failing]
    with pytest.raises(RunFailedError):
        outcome(broken)
    assert_answers(good, outcome(good))
    assert held.later_sizes == [2]
