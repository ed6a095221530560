"""Which golden vectors are replayed next, and when: decided without a thread and without a clock."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.server.canary import BUSY_SHARE, IDLE_SHARE, CanarySchedule, Check, checks_of
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.models.repository import FailedModel, Model
from attention_serving.server.engine.run.provider import Device
from tests.server.samples import CROSS, SELF

PERIOD = 100.0
RUN_SECONDS = 0.001


@pytest.fixture(scope="module")
def pair(artifacts: Path) -> list[Model]:
    """Two models with their golden vectors; the first also has sessions on two threads."""
    first = load_model(artifacts / SELF / "1", Device(threads=2))
    return [first, load_model(artifacts / CROSS / "1", Device(threads=1))]


def all_checks(models: list[Model]) -> list[Check]:
    return [check for model in models if isinstance(model, LoadedModel) for check in checks_of(model)]


def replays(
    schedule: CanarySchedule,
    models: list[Model],
    until: float,
    *,
    is_idle: bool,
    seconds: float = RUN_SECONDS,
) -> list[tuple[float, Check]]:
    """Asks as a thread would, on a clock of its own; each replay takes as long."""
    now, found = 0.0, []
    while now < until:
        if (check := schedule.next(models, now, is_idle=is_idle)) is not None:
            found.append((now, check))
            now += seconds
            schedule.ended(now, seconds, was_idle=is_idle)
        now += schedule.delay(now)
    return found


def test_each_case_is_checked_on_every_session_of_its_graph(pair: list[Model]) -> None:
    for model in pair:
        assert isinstance(model, LoadedModel)
        every_session = {*model.sessions.values(), *model.parallel_sessions.values()}
        assert {check.session(model) for check in checks_of(model)} == every_session
        for is_parallel, sessions in ((False, model.sessions), (True, model.parallel_sessions)):
            cases = [index for index, case in enumerate(model.golden) if case.graph in sessions]
            assert [each.case for each in checks_of(model) if each.is_parallel is is_parallel] == cases


def test_an_idle_engine_is_checked_once_in_a_period_at_even_intervals(pair: list[Model]) -> None:
    checks = all_checks(pair)
    interval = PERIOD / len(checks)
    found = replays(CanarySchedule(PERIOD, 0.0), pair, 2 * PERIOD - interval / 2, is_idle=True)
    assert [check for _, check in found] == 2 * checks
    expected = [index * interval for index in range(2 * len(checks))]
    assert [at for at, _ in found] == pytest.approx(expected, abs=interval / 5)


def test_a_check_waits_for_an_idle_moment(pair: list[Model]) -> None:
    schedule = CanarySchedule(PERIOD, 0.0)
    checks = all_checks(pair)
    interval = PERIOD / len(checks)
    assert schedule.next(pair, 0.0, is_idle=True) == checks[0]
    schedule.ended(0.0, 0.0, was_idle=True)
    assert schedule.next(pair, 0.9 * interval, is_idle=True) is None
    assert schedule.next(pair, 1.5 * interval, is_idle=False) is None
    assert schedule.next(pair, 1.6 * interval, is_idle=True) == checks[1]
    schedule.ended(1.6 * interval, 0.0, was_idle=True)
    assert schedule.next(pair, 2.9 * interval, is_idle=False) is None
    assert schedule.next(pair, 3.1 * interval, is_idle=False) == checks[2]
    schedule.ended(50 * PERIOD, RUN_SECONDS, was_idle=True)  # time that has passed is not caught up with
    assert schedule.next(pair, 50 * PERIOD + RUN_SECONDS, is_idle=True) is None


@pytest.mark.parametrize(("is_idle", "share"), [(True, IDLE_SHARE), (False, BUSY_SHARE)])
@settings(max_examples=10)
@given(seconds=st.floats(1e-3, 20.0))
def test_replays_never_take_more_than_their_share_of_the_time(
    pair: list[Model], is_idle: bool, share: float, seconds: float
) -> None:
    schedule = CanarySchedule(0.1, 0.0)
    until = 50 * seconds / share
    found = replays(schedule, pair, until, is_idle=is_idle, seconds=seconds)
    assert len(found) > 20
    times = [at for at, _ in found]
    assert all(later - at >= 0.999 * seconds / share for at, later in itertools.pairwise(times))


def test_models_that_are_gone_are_skipped_and_new_ones_come_with_the_next_period(pair: list[Model]) -> None:
    first, second = pair
    schedule, seen, now = CanarySchedule(PERIOD, 0.0), [], PERIOD
    models: list[Model] = [first]
    assert schedule.next([FailedModel("m", "1", "")], 0.0, is_idle=True) is None
    assert schedule.delay(0.0) == PERIOD
    for _ in range(3):
        check = schedule.next(models, now, is_idle=True)
        assert check is not None
        seen.append(check.model())
        now += PERIOD
        schedule.ended(now, 0.0, was_idle=True)
        models = [FailedModel(first.name, first.version, ""), second]
    assert seen == [first, second, second]
