"""Errors outside a run neither end the engine's threads nor leave a request waiting forever."""

import dataclasses
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import DeadlineExceededError, RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.execute import Outputs, gather
from attention_serving.server.engine.run.run_memory import LARGE_RUN_BYTES
from attention_serving.server.engine.schedule import queue as queues
from attention_serving.server.engine.types import Array
from tests.server.samples import assert_answers, validated_of
from tests.server.seams import (
    MESSAGE,
    SAME_FOR_ALL,
    FailOnMarked,
    Held,
    Recorder,
    costing,
    engine_of,
    mark,
    outcome,
    wait,
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = engine_of(Limits(), Recorder(), parallel_runs=2)
    yield engine
    engine.close()


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


def assert_still_runs(engine: Engine, model: LoadedModel) -> None:
    """Every thread of the engine still takes requests."""
    requests = [validated_of(model, [(2, 2)], seed=seed) for seed in range(4)]
    for request in requests:
        engine.submit(request)
        assert_answers(request, outcome(request))


def test_threads_survive_an_arena_that_cannot_be_trimmed(
    self_model: LoadedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention_serving.server.engine.run.run_memory.IDLE_SECONDS", 0.0)
    broken = as_type(BrokenTrim, self_model)
    for seed in range(4):
        request = validated_of(broken, [(2, 2)], seed=seed)
        engine.submit(request)
        assert_answers(request, outcome(request))
    assert_still_runs(engine, self_model)


@pytest.mark.parametrize("inline", [False, True], ids=["on a thread", "inline"])
def test_a_batch_that_cannot_be_planned_fails_its_requests(
    self_model: LoadedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, inline: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(queues, "Batch", broken)
        for _ in range(3):
            request = validated_of(self_model, [(2, 2)])
            engine.submit(request, wake=not inline)
            if inline:
                assert not engine.run_inline(1.0)
            with pytest.raises(RunFailedError):
                outcome(request)
    assert_still_runs(engine, self_model)


def test_results_that_cannot_be_delivered_fail_their_requests(
    self_model: LoadedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = costing(self_model, SAME_FOR_ALL)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_deliver", broken)
        request = validated_of(model, [(2, 2), (3, 3)])
        engine.submit(request)
        with pytest.raises(RunFailedError):
            outcome(request)
    assert_still_runs(engine, self_model)


class Unmade:
    """In place of what makes the result of a request: fails for the first requests it is called for."""

    def __init__(self, failures: int) -> None:
        self._left = failures

    def __call__(self, results: list[Outputs]) -> dict[str, list[Array]]:
        self._left -= 1
        if self._left >= 0:
            raise RuntimeError(MESSAGE)
        return gather(results)


def test_a_result_that_cannot_be_made_fails_its_own_request_only(
    self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request has left the queue by then, and the others of its batch too."""
    with Held(self_model) as held:
        requests = [held.submit([(2, 2)], seed=seed) for seed in range(3)]
        # The held run is the first to end.
        monkeypatch.setattr("attention_serving.server.engine.engine.gather", Unmade(2))
    assert held.later_sizes == [3]
    for request in (held.first, requests[0]):
        with pytest.raises(RunFailedError):
            outcome(request)
    for request in requests[1:]:
        assert_answers(request, outcome(request))


def test_a_failing_callback_keeps_no_other_request_waiting(
    self_model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits for a request may fail: the others of its batch, and later ones, have their results."""
    faults = FailOnMarked()
    with Held(self_model, faults) as held:
        requests = [held.submit([(2, 2)], seed=seed) for seed in range(4)]
        late = [held.submit([(2, 2)], deadline=time.monotonic()) for _ in range(2)]
        for request in (requests[0], requests[1], late[0]):
            wait(request, broken)
        faults.marks.add(mark(requests[1]))
        held.gate.open()
        for request in (requests[2], requests[3]):
            assert_answers(request, outcome(request))
        with pytest.raises(DeadlineExceededError):
            outcome(late[1])
        assert_still_runs(held.engine, self_model)
    assert_answers(requests[0], requests[0].result())
    for request, error in ((requests[1], RunFailedError), (late[0], DeadlineExceededError)):
        with pytest.raises(error):
            request.result()
    assert caplog.text.count("callback failed") == 3
