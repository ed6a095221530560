"""When a request is refused because its result would come too late."""

import math

import pytest

from attention_serving.server.engine.errors import OverloadedError
from attention_serving.server.engine.schedule.queue import RETRY_STEP_SECONDS, WINDOW_SECONDS, Admission


def test_a_request_that_would_be_late_is_refused_with_the_time_to_retry() -> None:
    with pytest.raises(OverloadedError, match=r"expected in 3\.00 s, .* deadline in 1\.00 s") as refused:
        Admission().check(waiting=2.5, own=0.5, deadline=11.0, now=10.0)
    assert refused.value.retry_after == pytest.approx(3 - 0.9)


@pytest.mark.parametrize(
    ("waiting", "deadline"),
    [(0.8, 11.0), (0.0, 10.1), (100.0, math.inf), (100.0, 10.0), (100.0, 9.0)],
    ids=["in time", "nothing waits", "no deadline", "just expired", "long expired"],
)
def test_other_requests_are_admitted(waiting: float, deadline: float) -> None:
    Admission().check(waiting=waiting, own=0.05, deadline=deadline, now=10.0)


def test_the_advised_time_is_not_shorter_than_a_minimum() -> None:
    with pytest.raises(OverloadedError) as refused:
        Admission().check(waiting=0.9, own=0.001, deadline=1.0, now=0.0)
    assert refused.value.retry_after == RETRY_STEP_SECONDS


def test_the_rate_follows_what_is_measured_while_busy() -> None:
    admission, now = Admission(), 0.0
    for _ in range(60):
        admission.started(now)
        now += WINDOW_SECONDS
        admission.ended(work=3 * WINDOW_SECONDS, now=now, busy=True)
    assert admission.rate == pytest.approx(3, rel=1e-3)
    assert admission.seconds(6) == pytest.approx(2, rel=1e-3)


def test_idle_time_does_not_count() -> None:
    admission, now = Admission(), 0.0
    for _ in range(60):
        admission.started(now)
        now += WINDOW_SECONDS
        admission.ended(work=WINDOW_SECONDS, now=now, busy=False)
        now += 100
    assert admission.rate == pytest.approx(1)
