"""Failed runs, callers that left, deadlines, overload and the end."""

import gc
import math
import threading
import time
import weakref
from concurrent.futures import CancelledError
from contextlib import suppress

import numpy as np
import pytest

from server.engine.errors import (
    DeadlineExceededError,
    OverloadedError,
    RunFailedError,
    ShuttingDownError,
)
from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.observer import Run
from server.engine.scheduler import Scheduler
from server.engine.types import Array, Work
from tests.server.samples import assert_answers, work_of
from tests.server.seams import PATIENCE_SECONDS, WORDS, Culprits, Held, Recorder, mark, outcome, tapped


@pytest.mark.parametrize("position", [0, 1, 2], ids=["oldest", "middle", "youngest"])
def test_a_failing_run_fails_only_its_culprit(self_model: LoadedModel, position: int) -> None:
    culprits = Culprits()
    with Held(self_model, culprits) as held:
        works = [held.submit([(length, length)], seed=length) for length in (2, 3, 4)]
        culprits.marks.add(mark(works[position]))
    culprit = works.pop(position)
    with pytest.raises(RunFailedError) as caught:
        outcome(culprit)
    assert WORDS not in str(caught.value)
    for work in works:
        assert_answers(work, outcome(work))


def test_one_failing_sequence_fails_its_whole_request(self_model: LoadedModel) -> None:
    culprits = Culprits()
    with Held(self_model, culprits) as held:
        broken = held.submit([(2, 2), (3, 3), (4, 4)], seed=1)
        good = held.submit([(2, 2), (3, 3)], seed=2)
        culprits.marks.add(mark(broken, 1))
    with pytest.raises(RunFailedError):
        outcome(broken)
    assert_answers(good, outcome(good))


def test_after_a_session_that_always_fails_later_works_still_run(self_model: LoadedModel) -> None:
    broken = threading.Event()

    def tap(_: dict[str, Array]) -> None:
        if broken.is_set():
            raise RuntimeError(WORDS)

    model = tapped(self_model, tap)
    scheduler = Scheduler(Limits(), Recorder())
    broken.set()
    failed = [work_of(model, [(2, 2), (3, 3)], seed=seed) for seed in range(3)]
    for work in failed:
        scheduler.submit(work)
    for work in failed:
        with pytest.raises(RunFailedError):
            outcome(work)
    broken.clear()
    later = work_of(model, [(2, 2), (3, 3)])
    scheduler.submit(later)
    assert_answers(later, outcome(later))
    scheduler.close()


def test_a_cancelled_work_is_not_run(self_model: LoadedModel) -> None:
    with Held(self_model, max_batch_sequences=2) as held:
        works = [held.submit([(2, 2)], seed=seed) for seed in range(4)]
        assert works[0].future.cancel()
        assert works[2].future.cancel()
    assert held.later_sizes == [2]
    with pytest.raises(CancelledError):
        outcome(works[0])
    assert_answers(works[1], outcome(works[1]))
    assert_answers(works[3], outcome(works[3]))


def test_a_caller_may_leave_during_its_run(self_model: LoadedModel) -> None:
    with Held(self_model) as held:
        assert held.first.future.cancel()
        later = held.submit([(2, 2)])
    assert_answers(later, outcome(later))


def test_an_expired_work_is_told_so_and_not_run(self_model: LoadedModel) -> None:
    with Held(self_model) as held:
        head = held.submit([(2, 2)], deadline=time.monotonic())
        kept = held.submit([(2, 2)], seed=1)
        company = held.submit([(2, 2)], deadline=time.monotonic())
    assert held.later_sizes == [1]
    for work in (head, company):
        with pytest.raises(DeadlineExceededError, match="deadline passed"):
            outcome(work)
    assert_answers(kept, outcome(kept))


def released(work: Work) -> threading.Event:
    """Set once the scheduler has given the memory of a work back."""
    event = threading.Event()
    work.future.add_done_callback(lambda _: event.set())  # after the scheduler's own
    return event


@pytest.mark.parametrize("ending", ["result", "cancelled"])
def test_bytes_in_flight_are_bounded_and_given_back(self_model: LoadedModel, ending: str) -> None:
    size = work_of(self_model, [(5, 5)]).in_flight_bytes
    limit = work_of(self_model, [(1, 1)]).in_flight_bytes + 2 * size
    with Held(self_model, max_in_flight_bytes=limit) as held:
        works = [held.submit([(5, 5)]) for _ in range(2)]
        with pytest.raises(OverloadedError, match=rf"{limit + size} bytes; the limit is {limit};"):
            held.submit([(5, 5)])
        given_back = released(works[0])
        if ending == "result":
            held.gate.open()
        else:
            works[0].future.cancel()
        assert given_back.wait(PATIENCE_SECONDS)
        again = held.submit([(5, 5)], seed=1)
    assert_answers(again, outcome(again))


def test_one_request_beyond_the_limit_is_taken_when_nothing_else_is_in_flight(
    self_model: LoadedModel,
) -> None:
    scheduler = Scheduler(Limits(max_in_flight_bytes=1), Recorder())
    work = work_of(self_model, [(5, 5)])
    scheduler.submit(work)
    assert_answers(work, outcome(work))
    scheduler.close()


def test_works_that_were_given_up_hold_no_more_than_the_limit(self_model: LoadedModel) -> None:
    size = work_of(self_model, [(5, 5)]).in_flight_bytes
    limit = 4 * size
    references = []
    with Held(self_model, max_in_flight_bytes=limit) as held:
        for seed in range(20):
            with suppress(OverloadedError):
                work = held.submit([(5, 5)], seed=seed)
                references.append(weakref.ref(work))
                work.future.cancel()
                del work
        gc.collect()
        alive = sum(reference() is not None for reference in references)
    assert alive * size <= limit


def test_close_finishes_what_is_queued_and_then_refuses(self_model: LoadedModel) -> None:
    with Held(self_model, max_batch_sequences=1) as held:
        works = [held.submit([(length, length)], seed=length) for length in (2, 3, 4)]
    for work in works:
        assert work.future.done()
        assert_answers(work, outcome(work))
    with pytest.raises(ShuttingDownError, match="shutting down"):
        held.submit([(1, 1)])
    held.scheduler.close()


def test_closing_refuses_while_what_was_accepted_still_runs(self_model: LoadedModel) -> None:
    accepted: list[Work] = []
    with Held(self_model) as held:
        closing = threading.Thread(target=held.scheduler.close)
        closing.start()
        with suppress(ShuttingDownError):
            while closing.is_alive():
                accepted.append(held.submit([(2, 2)], seed=len(accepted)))
        assert not held.first.future.done()
        assert closing.is_alive()
    closing.join(PATIENCE_SECONDS)
    for work in [held.first, *accepted]:
        assert_answers(work, outcome(work))


class FailsOnce:
    """An observer that fails at the first run that it is told of."""

    def __init__(self) -> None:
        self._failed = False

    def ran(self, run: Run) -> None:
        if not self._failed:
            self._failed = True
            raise RuntimeError(run.model)


def test_an_observer_that_fails_changes_no_result(self_model: LoadedModel) -> None:
    scheduler = Scheduler(Limits(max_batch_sequences=2), FailsOnce())
    work = work_of(self_model, [(2, 2), (3, 3), (4, 4)])
    scheduler.submit(work)
    result = outcome(work)
    scheduler.close()
    assert_answers(work, result)


def test_no_deadline_never_expires(self_model: LoadedModel) -> None:
    with Held(self_model) as held:
        work = held.submit([(2, 2)], deadline=math.inf)
    assert np.isfinite(outcome(work).outputs["context_vectors"][0]).all()
