"""Errors of runs, and beside them: no thread ends, and no request waits forever."""

import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NoReturn

import numpy as np
import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine import engine as engines
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import DeadlineExceededError, OverloadedError, RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.schedule import queue as queues
from attention_serving.server.engine.types import Array, MaskKind, Result
from tests.server.samples import CROSS, SELF, Sample, assert_answers, validated_of
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


def test_a_run_out_of_memory_is_refused_as_overload(self_model: LoadedModel, engine: Engine) -> None:
    def fail(_: dict[str, Array]) -> None:
        raise MemoryError

    request = validated_of(tapped(self_model, fail), [(2, 2)])
    engine.submit(request)
    with pytest.raises(OverloadedError, match="more memory"):
        outcome(request)


@pytest.mark.parametrize(
    ("part", "name", "inline"),
    [(queues, "Batch", False), (queues, "Batch", True), (Engine, "_deliver", False)],
    ids=["planned on a thread", "planned inline", "delivered"],
)
def test_a_batch_that_cannot_be_planned_or_delivered_fails_its_requests(
    self_model: LoadedModel, engine: Engine, part: Any, name: str, inline: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part, name, broken)
        for _ in range(3):
            request = validated_of(self_model, [(2, 2)])
            engine.submit(request, wake=not inline)
            if inline:
                assert not engine.run_inline(1.0)
            with pytest.raises(RunFailedError):
                outcome(request)
    assert_still_runs(engine, self_model)


def test_a_failing_result_fails_one_request(self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request has left the queue by then, and the others of its batch too."""
    failures = [RuntimeError(MESSAGE)] * 2

    def unmade(outputs: dict[str, list[Array]]) -> Result:
        if failures:
            raise failures.pop()
        return Result(outputs)

    with Held(self_model) as held:
        requests = [held.submit([(2, 2)], seed=seed) for seed in range(3)]
        # The held run is the first to end.
        monkeypatch.setattr("attention_serving.server.engine.engine.Result", unmade)
    assert held.recorder.sizes[1:] == [3]
    for request in (held.first, requests[0]):
        with pytest.raises(RunFailedError):
            outcome(request)
    for request in requests[1:]:
        assert_answers(request, outcome(request))


def test_the_arena_is_trimmed_once_some_time_after_large_runs_or_may_fail_to_be(
    self_model: LoadedModel, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[LoadedModel] = []

    def shrink(model: LoadedModel) -> None:
        trims.append(model)
        raise RuntimeError(MESSAGE)

    monkeypatch.setattr(LoadedModel, "shrink_arena", shrink)
    monkeypatch.setattr(engines, "LARGE_RUN_BYTES", self_model.run_bytes(GraphKind.PLAIN, 1, (5,)))
    for length, seconds in ((5, 3600.0), (4, 0.0), (5, 0.0)):
        assert trims == []
        monkeypatch.setattr(engines, "TRIM_SECONDS", seconds)
        request = validated_of(self_model, [(length, length)])
        engine.submit(request)
        outcome(request)
    wait_until(lambda: trims)
    assert_still_runs(engine, self_model)
    assert trims == [self_model]


@pytest.mark.parametrize("abandoned", [True, False], ids=["all callers left", "one caller waits"])
def test_a_run_ends_when_all_of_its_callers_left(self_model: LoadedModel, *, abandoned: bool) -> None:
    """The runtime itself ends the run: it is asked to before the gate lets the run begin."""
    gate, recorder = Gate(), Recorder()
    model = tapped(costing(self_model, SAME_FOR_ALL), gate)  # one second
    engine = engine_of(Limits(), recorder, parallel_runs=1)
    first = validated_of(dataclasses.replace(model), [(1, 1)])  # of another model, so that it runs alone
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


CALLERS, PER_CALLER = 4, 40
FATES = ("answered", "answered", "answered", "cancelled", "expired", "failed")
ERRORS = {"expired": DeadlineExceededError, "failed": RunFailedError}


def random_request(
    rng: np.random.Generator, models: list[LoadedModel], faults: FailOnMarked
) -> tuple[Sample, str]:
    """A request, and how it is to end."""
    fate = FATES[rng.integers(len(FATES))]
    lengths = [(int(query), int(key)) for query, key in rng.integers(1, 9, (rng.integers(1, 5), 2))]
    request = validated_of(
        models[rng.integers(len(models))],
        lengths,
        seed=int(rng.integers(1 << 30)),
        kind=(None, None, *MaskKind)[rng.integers(5)],
        return_weights=bool(rng.integers(2)),
        deadline=time.monotonic() if fate == "expired" else math.inf,
    )
    if fate == "failed":
        faults.marks.add(mark(request, int(rng.integers(len(lengths)))))
    return request, fate


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_many_callers_at_once_get_their_own_answers(models: dict[str, LoadedModel], seed: int) -> None:
    faults, recorder, together = FailOnMarked(), Recorder(), threading.Barrier(CALLERS)
    own = [tapped(models[name], faults) for name in (SELF, CROSS)]
    engine = engine_of(Limits(max_batch_sequences=5), recorder)

    def call(number: int) -> list[tuple[Sample, str]]:
        rng = np.random.default_rng(CALLERS * seed + number)
        requests = [random_request(rng, own, faults) for _ in range(PER_CALLER)]
        together.wait(PATIENCE_SECONDS)
        for request, fate in requests:
            wake, limit = bool(rng.integers(2)), (0.0, math.inf)[rng.integers(2)]
            engine.submit(request, wake=wake)
            if fate == "cancelled":
                engine.fail(request, None)
                assert request.is_done
            while not wake and engine.run_inline(limit):
                pass
        return requests

    with ThreadPoolExecutor(CALLERS) as pool:
        fates = [pair for found in pool.map(call, range(CALLERS)) for pair in found]
    engine.close()
    withdrawn = [request for request, _ in fates if request.is_done and request.outcome is None]
    assert [code for _, code in recorder.failed].count("CANCELLED") == len(withdrawn) > 0
    assert {fate for _, fate in fates} == set(FATES)
    assert max(recorder.sizes) <= 5
    for request, fate in fates:
        if request in withdrawn:
            assert fate == "cancelled"
            continue
        with pytest.raises(ERRORS[fate]) if fate in ERRORS else nullcontext():
            assert_answers(request, outcome(request))
