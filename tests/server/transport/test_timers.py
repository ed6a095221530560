"""Timers: callbacks run in order, once, and not after they were cancelled."""

import math
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attention_serving.server.transport.completion_queue import SPARE, Timers


class TimersMachine(RuleBasedStateMachine):
    """Compares the timers with a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.timers = Timers()
        self.now = 0.0
        self.due: dict[int, float] = {}
        self.called: list[int] = []
        self.expected: list[int] = []
        self.numbers: list[int] = []

    @rule(after=st.integers(-2, 9), count=st.integers(1, 60))
    def add(self, after: int, count: int) -> None:
        for _ in range(count):
            name = len(self.numbers)
            number = self.timers.add(self.now + after, lambda name=name: self.called.append(name))  # type: ignore[misc]
            self.due[name] = self.now + after
            self.numbers.append(number)

    @precondition(lambda self: self.numbers)
    @rule(data=st.data(), count=st.integers(1, 60))
    def cancel(self, data: st.DataObject, count: int) -> None:
        first = data.draw(st.integers(0, len(self.numbers) - 1))
        for name in range(first, min(first + count, len(self.numbers))):
            self.due.pop(name, None)
            self.timers.cancel(self.numbers[name])
            assert len(self.timers._heap) <= 2 * len(self.due) + SPARE

    @rule(seconds=st.integers(0, 4))
    def run(self, seconds: int) -> None:
        self.now += seconds
        ready = sorted((due, name) for name, due in self.due.items() if due <= self.now)
        self.expected += [name for _, name in ready]
        self.due = {name: due for name, due in self.due.items() if due > self.now}
        self.timers.run_due(self.now)
        assert self.timers.next_due > self.now

    @invariant()
    def callbacks_that_are_due_ran_in_order_and_once(self) -> None:
        assert self.called == self.expected

    @invariant()
    def the_next_moment_is_not_late(self) -> None:
        assert self.timers.next_due <= min(self.due.values(), default=math.inf)


TestTimers = TimersMachine.TestCase
TestTimers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.fixture
def timers() -> Timers:
    return Timers()


@pytest.mark.parametrize("ending", ["called", "cancelled"])
def test_a_callback_that_ran_or_was_cancelled_is_released(timers: Timers, ending: str) -> None:
    def callback() -> None:
        pass

    number, alive = timers.add(1, callback), weakref.ref(callback)
    del callback
    assert alive() is not None
    if ending == "called":
        timers.run_due(1)
    else:
        timers.cancel(number)
    assert alive() is None


def test_a_timer_that_fails_does_not_keep_the_others_from_running() -> None:
    timers, ran = Timers(), []

    def fail() -> None:
        raise RuntimeError

    timers.add(1.0, fail)
    timers.add(2.0, lambda: ran.append(2.0))
    timers.run_due(3.0)
    assert ran == [2.0]
