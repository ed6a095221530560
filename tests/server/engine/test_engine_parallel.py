"""Parallel runs: how many, on which thread, and that each result stays with its request."""

import math
import threading
from collections.abc import Iterator

import pytest

from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Array
from tests.server.samples import assert_answers, validated_of
from tests.server.seams import (
    PATIENCE_SECONDS,
    SAME_FOR_ALL,
    Gate,
    Recorder,
    Threads,
    costing,
    engine_of,
    outcome,
    tapped,
)

ONE_BY_ONE = Limits(max_batch_sequences=1)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = engine_of(ONE_BY_ONE, Recorder(), parallel_runs=2)
    yield engine
    engine.close()


def test_as_many_runs_are_under_way_as_are_allowed(self_model: LoadedModel, engine: Engine) -> None:
    gates = [Gate() for _ in range(3)]
    requests = [
        validated_of(tapped(self_model, gate), [(2, 2)], seed=seed) for seed, gate in enumerate(gates)
    ]
    for request in requests:
        engine.submit(request)
    assert gates[0].entered.wait(PATIENCE_SECONDS)
    assert gates[1].entered.wait(PATIENCE_SECONDS)
    assert not engine.run_inline(math.inf)
    assert not gates[2].entered.is_set()
    gates[1].open()
    assert gates[2].entered.wait(PATIENCE_SECONDS)
    assert not requests[0].is_done
    for gate in gates:
        gate.open()
    for request in requests:
        assert_answers(request, outcome(request))


def test_sequences_of_one_request_run_in_parallel(self_model: LoadedModel, engine: Engine) -> None:
    meeting = threading.Barrier(2)

    def meet(_: dict[str, Array]) -> None:
        meeting.wait(PATIENCE_SECONDS)

    model = tapped(self_model, meet)
    request = validated_of(model, [(length, length) for length in (3, 1, 4, 1, 5, 9)])
    engine.submit(request)
    assert_answers(request, outcome(request))


def test_a_request_behind_a_long_one_runs_although_nothing_runs_inline_again(
    self_model: LoadedModel, engine: Engine
) -> None:
    gate = Gate()
    long = validated_of(tapped(costing(self_model, SAME_FOR_ALL), gate), [(2, 2)])
    short = validated_of(self_model, [(3, 3)])
    for request in (long, short):
        engine.submit(request, wake=False)
    assert not engine.run_inline(0.9)  # hands the long one over
    assert gate.entered.wait(PATIENCE_SECONDS)
    assert_answers(short, outcome(short))
    gate.open()
    assert_answers(long, outcome(long))


@pytest.mark.parametrize(("limit_seconds", "is_here"), [(1.0, True), (0.9, False)], ids=["short", "long"])
def test_a_run_beside_another_is_inline_only_if_it_is_short(
    self_model: LoadedModel, engine: Engine, limit_seconds: float, is_here: bool
) -> None:
    gate, threads = Gate(), Threads()
    held = validated_of(tapped(self_model, gate), [(2, 2)])
    engine.submit(held)
    assert gate.entered.wait(PATIENCE_SECONDS)
    beside = validated_of(tapped(costing(self_model, SAME_FOR_ALL), threads), [(3, 3)])
    engine.submit(beside, wake=False)
    assert engine.run_inline(limit_seconds) == is_here
    assert_answers(beside, outcome(beside))
    assert (threads.names == [threading.current_thread().name]) == is_here
    gate.open()
    assert_answers(held, outcome(held))
