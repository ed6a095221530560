"""A caller that has time runs what is next on its own thread; the rest is the scheduler's."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from server.engine.errors import DeadlineExceededError, RunFailedError, ShuttingDownError
from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.scheduler import IDLE_FACTOR, Scheduler
from tests.server.samples import assert_answers, validated_of
from tests.server.seams import (
    MESSAGE,
    PATIENCE_SECONDS,
    SAME_FOR_ALL,
    Culprits,
    Gate,
    Held,
    Recorder,
    Threads,
    costing,
    mark,
    outcome,
    tapped,
)

HERE = threading.main_thread().name
THREAD = "scheduler"
ANY_RUN = math.inf


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(Limits(), Recorder(), parallel_runs=1)
    yield scheduler
    scheduler.close()


class Taking:
    """A thread of a caller who takes turns, from the first run on, which is held."""

    def __init__(self, scheduler: Scheduler, model: LoadedModel, *, turns: int) -> None:
        self.gate = Gate()
        self.held = validated_of(tapped(model, self.gate), [(2, 2)])
        scheduler.submit(self.held, wake=False)
        self._thread = threading.Thread(
            target=lambda: [scheduler.run_inline(ANY_RUN) for _ in range(turns)], name="caller"
        )
        self._thread.start()
        assert self.gate.entered.wait(PATIENCE_SECONDS)

    def finish(self) -> None:
        self.gate.open()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        assert_answers(self.held, outcome(self.held))


def test_an_idle_scheduler_runs_on_the_callers_thread(self_model: LoadedModel, scheduler: Scheduler) -> None:
    threads = Threads()
    request = validated_of(tapped(self_model, threads), [(3, 3), (3, 3)])
    scheduler.submit(request, wake=False)
    assert not request.future.done()
    assert scheduler.run_inline(ANY_RUN)
    assert request.future.done()
    assert threads.names == [HERE]
    assert_answers(request, outcome(request))


@pytest.mark.parametrize(
    ("limit_seconds", "thread"),
    [(1 / IDLE_FACTOR, HERE), (0.9 / IDLE_FACTOR, THREAD)],
    ids=["short", "long"],
)
def test_a_run_that_is_expected_to_be_long_is_handed_to_the_schedulers_thread(
    self_model: LoadedModel, scheduler: Scheduler, limit_seconds: float, thread: str
) -> None:
    threads = Threads()
    model = tapped(costing(self_model, SAME_FOR_ALL), threads)
    requests = [validated_of(model, [(length, length)], seed=length) for length in (3, 4)]
    for request in requests:
        scheduler.submit(request, wake=False)
    assert scheduler.run_inline(limit_seconds) == (thread == HERE)
    for request in requests:
        assert_answers(request, outcome(request))
    assert threads.names == [thread]


def test_without_work_there_is_nothing_to_run(scheduler: Scheduler) -> None:
    assert not scheduler.run_inline(ANY_RUN)


def test_what_was_run_is_not_run_again(self_model: LoadedModel, scheduler: Scheduler) -> None:
    scheduler.submit(validated_of(self_model, [(3, 3)]), wake=False)
    assert scheduler.run_inline(ANY_RUN)
    assert not scheduler.run_inline(ANY_RUN)


def test_while_another_run_goes_on_a_turn_does_nothing_and_the_work_runs_afterwards(
    self_model: LoadedModel,
) -> None:
    with Held(self_model) as held:
        request = validated_of(held.model, [(3, 3)])
        held.scheduler.submit(request, wake=False)
        assert not held.scheduler.run_inline(ANY_RUN)
        assert not request.future.done()
        held.gate.open()
        assert_answers(request, outcome(request))


def test_what_comes_during_a_callers_turn_runs_in_its_next(
    self_model: LoadedModel, scheduler: Scheduler
) -> None:
    threads = Threads()
    taking = Taking(scheduler, self_model, turns=2)
    later = validated_of(tapped(self_model, threads), [(3, 3)])
    scheduler.submit(later, wake=False)
    assert not scheduler.run_inline(ANY_RUN)
    assert not later.future.done()
    taking.finish()
    assert_answers(later, outcome(later))
    assert threads.names == ["caller"]


def test_the_thread_is_not_called_for_what_a_caller_takes_a_turn_for(
    self_model: LoadedModel, scheduler: Scheduler
) -> None:
    threads = Threads()
    taking = Taking(scheduler, self_model, turns=1)
    later = validated_of(tapped(self_model, threads), [(3, 3)])
    scheduler.submit(later, wake=False)
    taking.finish()
    assert scheduler.run_inline(ANY_RUN)
    assert_answers(later, outcome(later))
    assert threads.names == [HERE]


def test_the_thread_runs_what_it_was_called_for_although_callers_take_turns(
    self_model: LoadedModel, scheduler: Scheduler
) -> None:
    threads = Threads()
    taking = Taking(scheduler, self_model, turns=1)
    later = validated_of(tapped(self_model, threads), [(3, 3)])
    scheduler.submit(later)
    assert not later.future.done()
    taking.finish()
    assert_answers(later, outcome(later))
    assert threads.names == [THREAD]


def test_a_failing_turn_resolves_its_future_and_the_next_one_runs(
    self_model: LoadedModel, scheduler: Scheduler
) -> None:
    culprits = Culprits()
    model = tapped(self_model, culprits)
    failing, good = (validated_of(model, [(2, 2)], seed=seed) for seed in range(2))
    culprits.marks.add(mark(failing))
    for request in (failing, good):
        scheduler.submit(request, wake=False)
        assert scheduler.run_inline(ANY_RUN)
    error = failing.future.exception(PATIENCE_SECONDS)
    assert isinstance(error, RunFailedError)
    assert MESSAGE not in str(error)
    assert_answers(good, outcome(good))


def test_closing_waits_for_a_callers_run(self_model: LoadedModel) -> None:
    scheduler = Scheduler(Limits(), Recorder())
    taking = Taking(scheduler, self_model, turns=1)
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    with suppress(ShuttingDownError):
        while True:
            scheduler.submit(validated_of(self_model, [(1, 1)]), wake=False).cancel()
            time.sleep(0.001)
    assert closing.is_alive()
    assert not taking.held.future.done()
    taking.finish()
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive()


def test_closing_runs_what_nobody_took_a_turn_for(self_model: LoadedModel) -> None:
    scheduler = Scheduler(Limits(), Recorder())
    request = validated_of(self_model, [(3, 3)])
    scheduler.submit(request, wake=False)
    scheduler.close()
    assert request.future.done()
    assert_answers(request, outcome(request))


def test_an_expired_work_is_told_so_on_a_turn_and_not_run(
    self_model: LoadedModel, scheduler: Scheduler
) -> None:
    threads = Threads()
    request = validated_of(tapped(self_model, threads), [(2, 2)], deadline=time.monotonic())
    scheduler.submit(request, wake=False)
    assert not scheduler.run_inline(ANY_RUN)
    assert isinstance(request.future.exception(timeout=0), DeadlineExceededError)
    assert threads.names == []


def test_a_turn_runs_what_waits_behind_an_expired_work(self_model: LoadedModel, scheduler: Scheduler) -> None:
    expired = validated_of(self_model, [(2, 2)], deadline=time.monotonic())
    kept = validated_of(self_model, [(2, 2)], seed=1)
    for request in (expired, kept):
        scheduler.submit(request, wake=False)
    assert scheduler.run_inline(ANY_RUN)
    assert isinstance(expired.future.exception(timeout=0), DeadlineExceededError)
    assert_answers(kept, outcome(kept))
