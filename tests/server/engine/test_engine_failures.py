"""Errors of runs, and beside them: no thread ends, and no request waits forever."""

import dataclasses
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine import engine as engines
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import DeadlineExceededError, OverloadedError, RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.execute import Outputs, gather
from attention_serving.server.engine.schedule import queue as queues
from attention_serving.server.engine.types import Array
from tests.server.samples import SELF, assert_answers, validated_of
from tests.server.seams import (
    MESSAGE,
    PATIENCE_SECONDS,
    SAME_FOR_ALL,
    FailOnMarked,
    Gate,
    Held,
    Recorder,
    costing,
    engine_of,
    mark,
    outcome,
    tapped,
    wait_until,
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
    assert held.recorder.failed == [(SELF, "INTERNAL")]
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
        withdraw(held.engine, held.submit([(2, 2)], deadline=time.monotonic()))  # too late: it has expired
    assert held.later_sizes == [1]
    assert sorted(held.recorder.failed) == [(SELF, "CANCELLED"), *[(SELF, "DEADLINE_EXCEEDED")] * 3]
    assert cancelled.outcome is None
    for request in late:
        with pytest.raises(DeadlineExceededError, match="deadline passed"):
            outcome(request)
    assert_answers(kept, outcome(kept))


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


def test_the_arena_is_trimmed_once_some_time_after_large_runs_or_may_fail_to_be(
    self_model: LoadedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []

    class Trimmed(LoadedModel):
        def shrink_arena(self) -> None:
            trims.append(1)
            raise RuntimeError(MESSAGE)

    def run(length: int, seconds: float) -> None:
        monkeypatch.setattr(engines, "TRIM_SECONDS", seconds)
        request = validated_of(model, [(length, length)])
        engine.submit(request)
        outcome(request)

    model = Trimmed(**{each.name: getattr(self_model, each.name) for each in dataclasses.fields(self_model)})
    monkeypatch.setattr(engines, "LARGE_RUN_BYTES", model.run_bytes(GraphKind.PLAIN, 1, 5, 5))
    run(5, 3600.0)
    run(4, 0.0)
    assert_still_runs(engine, self_model)
    assert trims == []
    run(5, 0.0)
    wait_until(lambda: trims)
    assert_still_runs(engine, self_model)
    assert trims == [1]


class TerminationRecorder(Recorder):
    """Says when a run was ended early."""

    terminated = False

    def run_terminated(self, model: str) -> None:
        self.terminated = bool(model)


@pytest.mark.parametrize("abandoned", [True, False], ids=["all callers left", "one caller waits"])
def test_a_run_is_ended_once_all_of_its_callers_have_left(
    self_model: LoadedModel, *, abandoned: bool
) -> None:
    """The runtime itself ends the run: it is asked to before the gate lets the run begin."""
    gate, recorder = Gate(), TerminationRecorder()
    slow = {kind: dataclasses.replace(cost, call=1.0) for kind, cost in self_model.costs.items()}
    model = dataclasses.replace(tapped(self_model, gate), costs=slow)
    engine = engine_of(Limits(), recorder, parallel_runs=1)
    first = validated_of(dataclasses.replace(model), [(1, 1)])
    engine.submit(first)
    assert gate.entered.wait(PATIENCE_SECONDS)
    withdraw(engine, first)
    requests = [validated_of(model, [(3, 3)], seed=seed) for seed in range(2)]
    for request in requests:
        engine.submit(request)
    left = requests if abandoned else requests[:1]
    for request in left:
        withdraw(engine, request)
    gate.open()
    wait_until(lambda: recorder.terminated)
    if not abandoned:
        outcome(requests[1])
    engine.close()
    assert recorder.sizes == ([] if abandoned else [1])
