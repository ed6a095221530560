"""Which children count as failed, and when the next process of one starts."""

import pytest

from attention_serving.server.supervision import Watchdog, backoff


def passed(watchdog: Watchdog, ticks: int, *, responsive: bool | None = None) -> None:
    """Ticks of the supervisor, each of which is answered, or not if `responsive` is None."""
    for _ in range(ticks):
        watchdog.elapsed(watchdog.interval)
        if watchdog.ping() and responsive is not None:
            watchdog.heard(responsive=responsive)


@pytest.mark.parametrize("answer", [None, False], ids=["silent", "stuck"])
def test_a_process_fails_after_the_timeout(answer: bool | None) -> None:
    watchdog = Watchdog(5)
    passed(watchdog, 100, responsive=True)
    passed(watchdog, 5, responsive=answer)
    assert not watchdog.failed
    passed(watchdog, 1, responsive=answer)
    assert watchdog.failed
    assert watchdog.is_stuck is (answer is False)


def test_one_ping_is_unanswered_at_a_time() -> None:
    watchdog = Watchdog(5)
    assert [watchdog.ping() for _ in range(3)] == [True, False, False]
    watchdog.heard(responsive=True)
    assert [watchdog.ping() for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("is_excused", [True, False], ids=["excused", "a good heartbeat"])
def test_the_time_starts_anew(is_excused: bool) -> None:
    watchdog = Watchdog(5)
    passed(watchdog, 5, responsive=False)
    if is_excused:
        watchdog.excused()
    else:
        passed(watchdog, 1, responsive=True)
    passed(watchdog, 5, responsive=False)
    assert not watchdog.failed


def test_time_during_which_the_supervisor_did_not_run_hardly_counts() -> None:
    watchdog = Watchdog(30)
    watchdog.elapsed(3600)
    assert watchdog.silent_seconds == 2


@pytest.mark.parametrize(("timeout", "interval"), [(0, 1), (30, 1), (4, 1), (1, 0.25)])
def test_pings_are_frequent_enough_and_without_a_timeout_nothing_fails(
    timeout: float, interval: float
) -> None:
    watchdog = Watchdog(timeout)
    assert watchdog.interval == interval
    passed(watchdog, 1000)
    assert watchdog.failed is (timeout > 0)


def test_the_delay_doubles_up_to_its_maximum_while_processes_keep_ending() -> None:
    delays = [0.0]
    for _ in range(8):
        delays.append(backoff(delays[-1], served_seconds=29.0))
    assert delays[1:] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff(30, served_seconds=31.0) == 0.5  # after long service
