"""Errors of runs, and beside them: no thread ends, and no request waits forever."""

import dataclasses
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest

from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import DeadlineExceededError, OverloadedError, RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.execute import Outputs, gather
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
    tapped,
    withdraw,
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = engine_of(Limits(), Recorder(), parallel_runs=2)
    yield engine
    engine.close()


def broken(*_: object) -> NoReturn:
    """In place of what runs, plans a batch or delivers its results."""
    raise RuntimeError(MESSAGE)


def assert_still_runs(engine: Engine, model: LoadedModel) -> None:
    """Every thread of the engine still takes requests."""
    requests = [validated_of(model, [(2, 2)], seed=seed) for seed in range(4)]
    for request in requests:
        engine.submit(request)
        assert_answers(request, outcome(request))


@pytest.mark.parametrize("at_fault", [0, 2], ids=["oldest", "youngest"])
def test_a_failing_run_fails_only_the_request_at_fault(self_model: LoadedModel, at_fault: int) -> None:
    faults = FailOnMarked()
    with Held(self_model, faults) as held:
        requests = [held.submit([(length, length)] * 2, seed=length) for length in (2, 3, 4)]
        faults.marks.add(mark(requests[at_fault], 1))
    failed = requests.pop(at_fault)
    with pytest.raises(RunFailedError) as caught:
        outcome(failed)
    assert MESSAGE not in str(caught.value)
    for request in requests:
        assert_answers(request, outcome(request))


def test_a_failing_graph_for_mixed_lengths_fails_no_request(cross_model: LoadedModel) -> None:
    def fail_with_lengths(inputs: dict[str, Array]) -> None:
        if "key_lengths" in inputs:
            raise RuntimeError(MESSAGE)

    with Held(cross_model, fail_with_lengths) as held:
        requests = [held.submit([(length, length)], seed=length) for length in (2, 3, 4)]
    for request in requests:
        assert_answers(request, outcome(request))


def test_a_run_out_of_memory_is_refused_as_overload(self_model: LoadedModel, engine: Engine) -> None:
    def fail(_: dict[str, Array]) -> None:
        raise MemoryError

    request = validated_of(tapped(self_model, fail), [(2, 2)])
    engine.submit(request)
    with pytest.raises(OverloadedError, match="more memory"):
        outcome(request)


def test_what_is_cancelled_or_expired_does_not_run(self_model: LoadedModel) -> None:
    with Held(self_model) as held:
        cancelled, kept = held.submit([(2, 2)]), held.submit([(2, 2)], seed=1)
        late = [held.submit([(2, 2)] * count, deadline=time.monotonic()) for count in (1, 3)]
        withdraw(held.engine, cancelled)
    assert held.later_sizes == [1]
    assert cancelled.outcome is None
    for request in late:
        with pytest.raises(DeadlineExceededError, match="deadline passed"):
            outcome(request)
    assert_answers(kept, outcome(kept))


class BrokenTrim(LoadedModel):
    """A model whose arena cannot be trimmed."""

    def shrink_arena(self) -> None:
        raise RuntimeError(MESSAGE)


def test_threads_survive_an_arena_that_cannot_be_trimmed(
    self_model: LoadedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention_serving.server.engine.engine.LARGE_RUN_BYTES", 0)
    monkeypatch.setattr("attention_serving.server.engine.engine.TRIM_SECONDS", 0.0)
    fields = {field.name: getattr(self_model, field.name) for field in dataclasses.fields(self_model)}
    assert_still_runs(engine, BrokenTrim(**fields))
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


def test_a_result_that_cannot_be_made_fails_its_own_request_only(
    self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request has left the queue by then, and the others of its batch too."""
    failures = [RuntimeError(MESSAGE)] * 2

    def unmade(results: list[Outputs]) -> dict[str, list[Array]]:
        if failures:
            raise failures.pop()
        return gather(results)

    with Held(self_model) as held:
        requests = [held.submit([(2, 2)], seed=seed) for seed in range(3)]
        # The held run is the first to end.
        monkeypatch.setattr("attention_serving.server.engine.engine.gather", unmade)
    assert held.later_sizes == [3]
    for request in (held.first, requests[0]):
        with pytest.raises(RunFailedError):
            outcome(request)
    for request in requests[1:]:
        assert_answers(request, outcome(request))
