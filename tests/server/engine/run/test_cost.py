"""The cost model: fitted coefficients, and the timing of runs."""

import math
import time
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from attention_serving.server.engine.run.cost import (
    LEAST_TIMED_ROUNDS,
    LONG_ENOUGH_SECONDS,
    MOST_TIMED_ROUNDS,
    MOST_TIMED_SECONDS,
    TIMED_SECONDS,
    TIMED_SIZES,
    RunCost,
    fit,
    time_in_turns,
    time_runs,
)

# Row and pair operations of the sizes that are timed, of a module 64 wide.
OPERATIONS = [(8192.0 * count * length, 256.0 * count * length**2) for count, length in TIMED_SIZES]
Timed = Sequence[tuple[tuple[float, float], float]]
operations = st.tuples(st.floats(0, 1e12), st.floats(0, 1e12))
timed = st.lists(st.tuples(operations, st.floats(1e-7, 100)), min_size=1, max_size=8)


@given(call=st.floats(1e-6, 1e-2), row=st.floats(1e-12, 1e-9), pair=st.floats(1e-12, 1e-9))
def test_coefficients_are_recovered_from_runs_without_noise(call: float, row: float, pair: float) -> None:
    known = RunCost(call, row, pair)
    found = fit(OPERATIONS, [known.seconds(*run) for run in OPERATIONS])
    for run in OPERATIONS:
        assert found.seconds(*run) == pytest.approx(known.seconds(*run), rel=1e-6)
    largest = known.seconds(*OPERATIONS[-1])
    assert found.call == pytest.approx(call, rel=1e-6)
    assert found.row * OPERATIONS[-1][0] == pytest.approx(row * OPERATIONS[-1][0], abs=1e-6 * largest)
    assert found.pair * OPERATIONS[-1][1] == pytest.approx(pair * OPERATIONS[-1][1], abs=1e-6 * largest)


@given(runs=timed)
@example(runs=[((2e-309 * count, 0.0), float(count)) for count in (1, 2, 3)])
def test_coefficients_are_finite_and_not_negative(runs: Timed) -> None:
    found = fit([run for run, _ in runs], [seconds for _, seconds in runs])
    for term in (found.call, found.row, found.pair):
        assert term >= 0
        assert math.isfinite(term)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([((100.0, 50.0), 0.5)] * 3, 0.5),
        ([((100.0, 0.0), 0.25), ((300.0, 0.0), 0.25)], 0.25),
        ([((0.0, 0.0), 0.125)] * 2, 0.125),
        ([((100.0, 50.0), 2.0)], 2.0),
    ],
    ids=["all rows equal", "no pairs", "no operations", "one run"],
)
def test_runs_that_leave_coefficients_ambiguous_are_still_matched(runs: Timed, expected: float) -> None:
    found = fit([run for run, _ in runs], [seconds for _, seconds in runs])
    for run, _ in runs:
        assert found.seconds(*run) == pytest.approx(expected)


def test_a_coefficient_that_would_be_negative_is_zero() -> None:
    found = fit([(1.0, 0.0), (2.0, 0.0), (3.0, 0.0)], [3.0, 2.0, 1.0])
    assert found.row == 0
    assert 1 <= found.call <= 3


@given(runs=timed, factor=st.floats(0.5, 2))
def test_a_larger_run_never_costs_less(runs: Timed, factor: float) -> None:
    assume(factor >= 1)
    found = fit([run for run, _ in runs], [seconds for _, seconds in runs])
    for (row, pair), _ in runs:
        assert found.seconds(factor * row, factor * pair) >= found.seconds(row, pair)


class Clock:
    """Goes on by what each run is said to take."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._left = list(seconds)
        self.sizes: list[tuple[int, int]] = []
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, count: int, length: int) -> None:
        self.sizes.append((count, length))
        self.now += self._left.pop(0)


def rounds(seconds: Sequence[float]) -> int:
    """How many of these runs of one size are timed."""
    clock = Clock(seconds)
    found = time_runs([(1, 1)], clock.run, clock)
    assert found == {(1, 1): pytest.approx(min(seconds[: len(clock.sizes)]))}
    return len(clock.sizes)


def test_the_shortest_run_of_each_size_counts() -> None:
    clock = Clock([1 / 64, 1 / 128, 1 / 128, 1 / 256, 1 / 256])
    assert time_runs([(1, 1), (1, 16)], clock.run, clock) == {(1, 1): 1 / 128, (1, 16): 1 / 256}
    assert clock.sizes == [(1, 1)] * 3 + [(1, 16)] * 2


def test_a_long_run_is_not_repeated_often() -> None:
    assert rounds([MOST_TIMED_SECONDS] * 9) == LEAST_TIMED_ROUNDS


def test_a_long_run_is_timed_once_on_a_clock_that_others_do_not_disturb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock([MOST_TIMED_SECONDS, 9.0])
    monkeypatch.setattr(time, "thread_time", clock)
    assert time_runs([(1, 1)], clock.run, clock) == {(1, 1): MOST_TIMED_SECONDS}


def test_a_short_run_is_repeated_for_a_while() -> None:
    assert rounds([TIMED_SECONDS / 3.5] * MOST_TIMED_ROUNDS) == 4


def test_a_run_is_repeated_until_two_agree() -> None:
    assert rounds([factor * TIMED_SECONDS for factor in (1.5, 1, 1.3, 1.05, 9)]) == 4


def test_runs_that_never_agree_are_repeated_for_a_while() -> None:
    assert rounds([MOST_TIMED_SECONDS * share for share in (0.2, 0.25, 0.3, 0.4, 0.5)]) == 4


@pytest.mark.parametrize("seconds", [1e-9, 1e-4])
def test_runs_are_not_repeated_without_end(seconds: float) -> None:
    assert rounds([seconds] * 1000) == MOST_TIMED_ROUNDS


def test_larger_sizes_are_skipped_once_a_run_takes_long() -> None:
    clock = Clock([0.9 * LONG_ENOUGH_SECONDS] * 2 + [2 * LONG_ENOUGH_SECONDS] * 2)
    assert list(time_runs(TIMED_SIZES, clock.run, clock)) == list(TIMED_SIZES[:2])


def ratios(monkeypatch: pytest.MonkeyPatch, first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Of two ways to run two sizes, whose runs take these times one after another."""
    clock = Clock([])
    ways = [iter(first), iter(second)]
    monkeypatch.setattr(time, "perf_counter", clock)

    def run(way: int, _count: int, _length: int) -> None:
        try:
            clock.now += next(ways[way])
        except StopIteration:
            raise MemoryError from None

    sizes = [(1, 1), (1, 16)]
    return list(time_in_turns(sizes, partial(run, 0), partial(run, 1)).values())


def test_ways_to_run_are_compared_by_their_shortest_runs_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first turn of both sizes is disturbed, the second is not.
    first, second = [8.0, 8.0, 4.0, 4.0, 0.5, 0.25, 1.0, 0.75], [9.0, 9.0, 9.0, 9.0, 0.5, 0.5, 1.0, 1.0]
    small, large = ([LONG_ENOUGH_SECONDS / 10 * each for each in taken] for taken in (first, second))
    assert ratios(monkeypatch, small, large) == pytest.approx([0.5, 0.75])


def test_ways_to_run_are_compared_at_sizes_that_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ratios(monkeypatch, [0.01, 0.01], [0.02, 0.02, 0.02]) == pytest.approx([0.5])
    with pytest.raises(MemoryError):
        ratios(monkeypatch, [], [])
