"""A queue under random works, cancellations, failures and time, beside a plain model of what it owes."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.engine.batch_queue import Entry, Group, RunQueue
from server.engine.errors import DeadlineExceededError, OverloadedError, RunFailedError
from server.engine.execute import choose_graph
from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.types import MaskKind, Work
from tests.server.samples import work_of

LONG, SHORT = 40, 6
one_long_among_short = st.tuples(
    st.lists(st.tuples(st.integers(1, SHORT), st.integers(1, SHORT)), max_size=5),
    st.sampled_from([(1, 1), (SHORT, SHORT), (LONG, 1), (LONG, LONG)]),
).map(lambda drawn: [*drawn[0], drawn[1]])
lengths_of_a_work = one_long_among_short.flatmap(st.permutations)
patience = st.sampled_from([math.inf, math.inf, 0.0, 1.0, 5.0])


@dataclass(eq=False)
class Ticket:
    """One sequence: where it belongs, what was before it, and how often it ran."""

    work: Work
    index: int
    sequences_before: int
    runs_before: int
    runs: int = 0

    def is_wanted(self, now: float) -> bool:
        return not self.work.future.done() and now < self.work.deadline


class QueueMachine(RuleBasedStateMachine):
    """Does with a queue what the scheduler does, its runs without a runtime."""

    def __init__(self, models: Sequence[LoadedModel], limits: Limits) -> None:
        super().__init__()
        self.models = models
        self.limits = limits
        self.queue = RunQueue(limits)
        self.now = 0.0
        self.runs = 0
        self.works: list[Work] = []
        self.waiting: list[Ticket] = []
        self.tickets: list[Ticket] = []
        self.expired: Counter[Work] = Counter()
        self.failed: set[Work] = set()
        self.group: Group | None = None

    @property
    def live(self) -> list[Work]:
        return [work for work in self.works if not work.future.done()]

    @rule(
        model=st.integers(0, 3),
        lengths=lengths_of_a_work,
        return_weights=st.booleans(),
        kind=st.sampled_from([None, MaskKind.KEYS]),
        seconds=patience,
    )
    def submit(
        self,
        model: int,
        lengths: list[tuple[int, int]],
        return_weights: bool,
        kind: MaskKind | None,
        seconds: float,
    ) -> None:
        deadline = self.now + seconds
        work = work_of(
            self.models[model], lengths, kind=kind, return_weights=return_weights, deadline=deadline
        )
        if self._is_too_much(work):
            with pytest.raises(OverloadedError):
                self.queue.add(work, self.now)
        else:
            self._add(work)

    def _is_too_much(self, work: Work) -> bool:
        held = sum(live.in_flight_bytes for live in self.live)
        return bool(self.live) and held + work.in_flight_bytes > self.limits.max_in_flight_bytes

    def _add(self, work: Work) -> None:
        number = self.queue.add(work, self.now)
        work.future.add_done_callback(lambda _: self.queue.release(number))
        before = sum(not ticket.work.future.done() for ticket in self.waiting)
        new = [Ticket(work, index, before + index, self.runs) for index in range(len(work.items))]
        self.works.append(work)
        self.waiting += new
        self.tickets += new

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        assert data.draw(st.sampled_from(self.live)).future.cancel()

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.group is None)
    @rule()
    def take(self) -> None:
        wanted = [ticket for ticket in self.waiting if ticket.is_wanted(self.now)]
        group, expired = self.queue.next(self.now)
        assert (group is None) == (not wanted)
        if group is not None:
            assert (group.work, group.entries[0].index) == (wanted[0].work, wanted[0].index)
            self._check_limits(group)
            self._note_runs(group)
        for work in expired:
            assert not work.future.done()
            assert work.deadline <= self.now
            self.expired[work] += 1
            work.future.set_exception(DeadlineExceededError("too late"))
        self.group = group

    def _check_limits(self, group: Group) -> None:
        model, count = group.work.model, len(group.entries)
        lanes = {(e.work.model, e.work.return_weights, e.work.masked) for e in group}
        assert len(lanes) == 1
        assert count <= (1 if model.runs_alone else self.limits.max_batch_sequences)
        longest = (max(e.lengths[0] for e in group), max(e.lengths[1] for e in group))
        assert count == 1 or model.padded_bytes(count, *longest) <= self.limits.max_batch_bytes
        kind = choose_graph(model, [e.item for e in group], return_weights=group.work.return_weights)
        alone = sum(model.seconds(kind, 1, *e.lengths) for e in group)
        assert group.seconds == model.seconds(kind, count, *longest)
        assert group.seconds <= alone * (1 + 1e-9)

    def _note_runs(self, group: Group) -> None:
        for entry in group:
            ticket = next(t for t in self.waiting if (t.work, t.index) == (entry.work, entry.index))
            assert ticket.is_wanted(self.now)
            assert self.runs - ticket.runs_before <= ticket.sequences_before
            ticket.runs += 1
            self.waiting.remove(ticket)
        self.runs += 1

    @precondition(lambda self: self.group is not None)
    @rule()
    def finish(self) -> None:
        for entry in self._ended():
            self._deliver(entry)

    @precondition(lambda self: self.group is not None)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        entries = self._ended()
        culprit = data.draw(st.integers(0, len(entries) - 1))
        for index, entry in enumerate(entries):
            if entry.work.future.done():
                continue
            if index == culprit:
                self.failed.add(entry.work)
                entry.work.future.set_exception(RunFailedError("no"))
            else:
                self._deliver(entry)

    def _ended(self) -> list[Entry]:
        assert self.group is not None
        group, self.group = self.group, None
        return group.entries

    def _deliver(self, entry: Entry) -> None:
        marker = np.array([self.works.index(entry.work), entry.index])
        if entry.progress.deliver(entry.index, {"context_vectors": marker}):
            self.queue.release(entry.progress.number)
            entry.progress.resolve()

    @invariant()
    def holds_no_more_than_the_limit(self) -> None:
        held = [work.in_flight_bytes for work in self.live]
        assert len(held) <= 1 or sum(held) <= self.limits.max_in_flight_bytes

    @invariant()
    def runs_nothing_twice(self) -> None:
        assert all(ticket.runs <= 1 for ticket in self.tickets)

    def teardown(self) -> None:
        while self.group is not None or self.queue:
            if self.group is not None:
                self.finish()
            self.take()
        assert self.group is None
        for number, work in enumerate(self.works):
            self._check_outcome(number, work)
        self._check_account()

    def _check_outcome(self, number: int, work: Work) -> None:
        assert self.expired[work] <= 1
        if work.future.cancelled():
            return
        if error := work.future.exception(timeout=0):
            assert isinstance(error, RunFailedError if work in self.failed else DeadlineExceededError)
            assert self.expired[work] == (work not in self.failed)
            return
        assert all(ticket.runs == 1 for ticket in self.tickets if ticket.work is work)
        markers = work.future.result(timeout=0).outputs["context_vectors"]
        assert [marker.tolist() for marker in markers] == [[number, i] for i in range(len(work.items))]

    def _check_account(self) -> None:
        """Whatever ended gave its bytes back: the whole limit is free, and not a byte more."""
        first, second, third = self._of_bytes(1, self.limits.max_in_flight_bytes - 1, 1)
        self.queue.add(first, self.now)
        self.queue.add(second, self.now)
        with pytest.raises(OverloadedError):
            self.queue.add(third, self.now)

    def _of_bytes(self, *sizes: int) -> Iterator[Work]:
        work = work_of(self.models[0], [(1, 1)])
        return (replace(work, in_flight_bytes=size, future=Future()) for size in sizes)
