"""A scheduler that is told to wait for company: how long, and for what it does not wait."""

import math
from collections.abc import Iterator

import pytest

from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.scheduler import Scheduler
from tests.server.samples import assert_answers, validated_of
from tests.server.seams import SAME_FOR_ALL, Recorder, Threads, costing, outcome, tapped

BRIEF, AGES = 0.05, 3600.0
FULL = 2


@pytest.fixture
def model(self_model: LoadedModel) -> LoadedModel:
    return costing(self_model, SAME_FOR_ALL)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def patient(recorder: Recorder) -> Iterator[Scheduler]:
    """Waits for ages."""
    scheduler = Scheduler(Limits(batch_delay_seconds=AGES, max_batch_sequences=FULL), recorder)
    yield scheduler
    scheduler.close()


@pytest.mark.parametrize("wake", [True, False], ids=["thread", "turn"])
def test_the_oldest_waits_as_long_as_it_is_told_and_then_runs(
    model: LoadedModel, recorder: Recorder, wake: bool
) -> None:
    scheduler = Scheduler(Limits(batch_delay_seconds=BRIEF), recorder)
    threads = Threads()
    request = validated_of(tapped(model, threads), [(3, 3)])
    scheduler.submit(request, wake=wake)
    if not wake:
        assert not scheduler.run_inline(math.inf)
    assert_answers(request, outcome(request))
    scheduler.close()
    assert recorder.runs[0].queue_seconds[0] >= BRIEF
    assert threads.names == ["scheduler"]


def test_company_that_comes_in_time_runs_with_the_oldest(
    model: LoadedModel, patient: Scheduler, recorder: Recorder
) -> None:
    requests = [validated_of(model, [(length, length)], seed=length) for length in (3, 4)]
    patient.submit(requests[0])
    assert not requests[0].future.done()
    patient.submit(requests[1])
    for request in requests:
        assert_answers(request, outcome(request))
    assert recorder.sizes == [FULL]


def test_a_full_lane_does_not_wait_for_its_turn(model: LoadedModel, patient: Scheduler) -> None:
    threads = Threads()
    request = validated_of(tapped(model, threads), [(3, 3)] * FULL)
    patient.submit(request, wake=False)
    assert patient.run_inline(math.inf)
    assert_answers(request, outcome(request))
    assert len(threads.names) == 1


def test_closing_does_not_wait_for_company(model: LoadedModel, recorder: Recorder) -> None:
    scheduler = Scheduler(Limits(batch_delay_seconds=AGES), recorder)
    request = validated_of(model, [(3, 3)])
    scheduler.submit(request)
    assert not request.future.done()
    scheduler.close()
    assert request.future.done()
    assert_answers(request, outcome(request))
