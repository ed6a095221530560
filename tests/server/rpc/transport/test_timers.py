"""Callbacks at their moments: in order, once, and not after they were cancelled."""

import math
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.rpc.transport.timers import SPARE, Timers


class TimersMachine(RuleBasedStateMachine):
    """Timers beside a plain dictionary of what is due when."""

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
    def calls_what_is_due_in_order_and_once(self) -> None:
        assert self.called == self.expected

    @invariant()
    def wakes_in_time(self) -> None:
        assert self.timers.next_due <= min(self.due.values(), default=math.inf)


TestTimers = TimersMachine.TestCase
TestTimers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.fixture
def timers() -> Timers:
    return Timers()


def test_numbers_tell_callbacks_apart(timers: Timers) -> None:
    assert len({timers.add(1, list) for _ in range(9)}) == 9


def test_without_callbacks_nothing_is_due(timers: Timers) -> None:
    timers.run_due(math.inf)
    assert timers.next_due == math.inf


def test_a_callback_may_add_another_which_waits_for_the_next_time(timers: Timers) -> None:
    called: list[str] = []

    def first() -> None:
        called.append("first")
        timers.add(1, lambda: called.append("second"))

    timers.add(1, first)
    timers.run_due(1)
    assert called == ["first"]
    timers.run_due(1)
    assert called == ["first", "second"]


@pytest.mark.parametrize("ending", ["called", "cancelled"])
def test_a_callback_that_is_done_with_is_forgotten(timers: Timers, ending: str) -> None:
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


def test_a_callback_may_cancel_itself(timers: Timers) -> None:
    called: list[int] = []

    def callback() -> None:
        called.append(number)
        timers.cancel(number)

    number = timers.add(1, callback)
    for _ in range(2):
        timers.run_due(1)
    assert called == [number]
