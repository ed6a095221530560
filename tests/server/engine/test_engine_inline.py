"""Inline runs: short batches on the caller's thread, everything else on the engine's."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import DeadlineExceededError, RunFailedError, ShuttingDownError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.schedule.queue import IDLE_FACTOR
from tests.server.samples import assert_answers, validated_of
from tests.server.seams import (
    MESSAGE,
    PATIENCE_SECONDS,
    SAME_FOR_ALL,
    FailOnMarked,
    Gate,
    Held,
    Recorder,
    Threads,
    costing,
    engine_of,
    mark,
    outcome,
    tapped,
)

HERE = threading.main_thread().name
THREAD = "scheduler"
ANY_RUN = math.inf


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = engine_of(Limits(), Recorder(), parallel_runs=1)
    yield engine
    engine.close()


class InlineCaller:
    """A thread that runs batches inline, the first of which is held."""

    def __init__(self, engine: Engine, model: LoadedModel, *, runs: int) -> None:
        self.gate = Gate()
        self.held = validated_of(tapped(model, self.gate), [(2, 2)])
        engine.submit(self.held, wake=False)
        self._thread = threading.Thread(
            target=lambda: [engine.run_inline(ANY_RUN) for _ in range(runs)], name="caller"
        )
        self._thread.start()
        assert self.gate.entered.wait(PATIENCE_SECONDS)

    def finish(self) -> None:
        self.gate.open()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        assert_answers(self.held, outcome(self.held))


def test_a_batch_runs_on_the_callers_thread(self_model: LoadedModel, engine: Engine) -> None:
    threads = Threads()
    request = validated_of(tapped(self_model, threads), [(3, 3), (3, 3)])
    engine.submit(request, wake=False)
    assert not request.is_done
    assert engine.run_inline(ANY_RUN)
    assert request.outcome is not None
    assert not engine.run_inline(ANY_RUN)
    assert threads.names == [HERE]
    assert_answers(request, outcome(request))


@pytest.mark.parametrize(
    ("limit_seconds", "thread"),
    [(1 / IDLE_FACTOR, HERE), (0.9 / IDLE_FACTOR, THREAD)],
    ids=["short", "long"],
)
def test_a_batch_that_is_expected_to_be_long_is_handed_to_a_thread(
    self_model: LoadedModel, engine: Engine, limit_seconds: float, thread: str
) -> None:
    threads = Threads()
    model = tapped(costing(self_model, SAME_FOR_ALL), threads)
    requests = [validated_of(model, [(length, length)], seed=length) for length in (3, 4)]
    for request in requests:
        engine.submit(request, wake=False)
    assert engine.run_inline(limit_seconds) == (thread == HERE)
    for request in requests:
        assert_answers(request, outcome(request))
    assert threads.names == [thread]


def test_a_request_runs_after_the_run_that_occupies_the_only_slot(
    self_model: LoadedModel,
) -> None:
    with Held(self_model) as held:
        request = validated_of(held.model, [(3, 3)])
        held.engine.submit(request, wake=False)
        assert not held.engine.run_inline(ANY_RUN)
        assert not request.is_done
        held.gate.open()
        assert_answers(request, outcome(request))


def test_a_request_that_arrives_during_an_inline_run_runs_in_the_next_one(
    self_model: LoadedModel, engine: Engine
) -> None:
    threads = Threads()
    caller = InlineCaller(engine, self_model, runs=2)
    later = validated_of(tapped(self_model, threads), [(3, 3)])
    engine.submit(later, wake=False)
    assert not engine.run_inline(ANY_RUN)
    assert not later.is_done
    caller.finish()
    assert_answers(later, outcome(later))
    assert threads.names == ["caller"]


def test_an_inline_submission_does_not_wake_the_thread(self_model: LoadedModel, engine: Engine) -> None:
    threads = Threads()
    caller = InlineCaller(engine, self_model, runs=1)
    later = validated_of(tapped(self_model, threads), [(3, 3)])
    engine.submit(later, wake=False)
    caller.finish()
    assert engine.run_inline(ANY_RUN)
    assert_answers(later, outcome(later))
    assert threads.names == [HERE]


def test_a_thread_that_was_woken_runs_the_request_although_a_caller_runs_inline(
    self_model: LoadedModel, engine: Engine
) -> None:
    threads = Threads()
    caller = InlineCaller(engine, self_model, runs=1)
    later = validated_of(tapped(self_model, threads), [(3, 3)])
    engine.submit(later)
    assert not later.is_done
    caller.finish()
    assert_answers(later, outcome(later))
    assert threads.names == [THREAD]


def test_a_failing_inline_run_ends_its_request_and_the_next_one_runs(
    self_model: LoadedModel, engine: Engine
) -> None:
    faults = FailOnMarked()
    model = tapped(self_model, faults)
    failing, good = (validated_of(model, [(2, 2)], seed=seed) for seed in range(2))
    faults.marks.add(mark(failing))
    for request in (failing, good):
        engine.submit(request, wake=False)
        assert engine.run_inline(ANY_RUN)
    with pytest.raises(RunFailedError) as caught:
        outcome(failing)
    assert MESSAGE not in str(caught.value)
    assert_answers(good, outcome(good))


def test_closing_waits_for_an_inline_run(self_model: LoadedModel) -> None:
    engine = engine_of(Limits(), Recorder())
    caller = InlineCaller(engine, self_model, runs=1)
    closing = threading.Thread(target=engine.close)
    closing.start()
    with suppress(ShuttingDownError):
        while True:
            request = validated_of(self_model, [(1, 1)])
            engine.submit(request, wake=False)
            engine.fail(request, None)
            time.sleep(0.001)
    assert closing.is_alive()
    assert not caller.held.is_done
    caller.finish()
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive()


def test_closing_runs_requests_that_were_not_run_inline(self_model: LoadedModel) -> None:
    engine = engine_of(Limits(), Recorder())
    request = validated_of(self_model, [(3, 3)])
    engine.submit(request, wake=False)
    engine.close()
    assert request.outcome is not None
    assert_answers(request, outcome(request))


@pytest.mark.parametrize("behind", [0, 1], ids=["alone", "before another"])
def test_an_expired_request_fails_inline_without_running(
    self_model: LoadedModel, engine: Engine, behind: int
) -> None:
    threads = Threads()
    expired = validated_of(tapped(self_model, threads), [(2, 2)], deadline=time.monotonic())
    kept = [validated_of(self_model, [(2, 2)], seed=1) for _ in range(behind)]
    for request in (expired, *kept):
        engine.submit(request, wake=False)
    assert engine.run_inline(ANY_RUN) == bool(behind)
    assert isinstance(expired.outcome, DeadlineExceededError)
    assert threads.names == []
    for request in kept:
        assert_answers(request, outcome(request))


@pytest.fixture
def awake() -> Iterator[Engine]:
    """A engine whose inline thread stays awake for as long as a test takes."""
    engine = engine_of(Limits(), Recorder(), awake_seconds=PATIENCE_SECONDS)
    yield engine
    engine.close()


def test_the_caller_stays_awake_after_a_run(self_model: LoadedModel, awake: Engine) -> None:
    assert not awake.run_inline(ANY_RUN)
    awake.submit(validated_of(self_model, [(3, 3)]), wake=False)
    assert awake.run_inline(ANY_RUN)
    assert awake.run_inline(ANY_RUN)


def test_the_caller_sleeps_while_a_thread_runs_a_batch(self_model: LoadedModel, awake: Engine) -> None:
    awake.submit(validated_of(self_model, [(3, 3)]), wake=False)
    assert awake.run_inline(ANY_RUN)
    gate = Gate()
    held = validated_of(tapped(self_model, gate), [(2, 2)])
    awake.submit(held)
    assert gate.entered.wait(PATIENCE_SECONDS)
    assert not awake.run_inline(ANY_RUN)
    gate.open()
    assert_answers(held, outcome(held))


def test_the_caller_sleeps_when_its_time_is_over(self_model: LoadedModel) -> None:
    with closing(engine_of(Limits(), Recorder(), awake_seconds=1e-9)) as engine:
        engine.submit(validated_of(self_model, [(3, 3)]), wake=False)
        assert engine.run_inline(ANY_RUN)
        assert not engine.run_inline(ANY_RUN)
