"""Under any order of events each sequence runs once, within the limits, and nothing waits for a free slot.

Every batch contains the oldest queued sequence, so a sequence waits at most for as many runs as there were
sequences before it when it arrived.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.budget import ANYONE, Caller
from attention_serving.server.engine.costs import RunCost
from attention_serving.server.engine.errors import DeadlineExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.schedule import queue as queues
from attention_serving.server.engine.schedule.batch import FULL_AT_FIXED_COSTS, Batch
from attention_serving.server.engine.schedule.queue import Next, Queue
from attention_serving.server.engine.types import MaskKind, Result
from tests.server.samples import Sample, validated_of
from tests.server.seams import SAME_FOR_ALL, costing, on_device, take

SLOTS = 2
LONG, SHORT = 40, 6
INLINE_SECONDS = 1.5
CALLERS = [ANYONE, Caller("other"), Caller("heavy", 3.0)]
one_long_among_short = st.tuples(
    st.lists(st.tuples(st.integers(1, SHORT), st.integers(1, SHORT)), max_size=5),
    st.sampled_from([(1, 1), (SHORT, SHORT), (LONG, 1), (LONG, LONG)]),
).map(lambda drawn: [*drawn[0], drawn[1]])
lengths_of_a_request = one_long_among_short.flatmap(st.permutations)


@dataclass(eq=False)
class Ticket:
    """One sequence: its request, its turn, what was queued before it, and how often it ran."""

    request: Sample
    index: int
    seconds: float
    """Expected duration of a run of the sequence alone."""
    longest: float
    """That of the longest sequence of its request."""
    turn: float
    sequences_before: int
    runs_before: int
    runs: int = 0

    @property
    def waits(self) -> bool:
        return not self.runs and not self.request.is_done

    def is_in_time(self, now: float) -> bool:
        return now + self.longest <= self.request.deadline


class QueueMachine(RuleBasedStateMachine):
    """Two threads, and one that submits and runs inline, as the scheduler and a transport do.

    Between two rules every thread that is needed may be at any point. The invariants hold at each of them.
    """

    def __init__(self, models: Sequence[LoadedModel], limits: Limits, callers: Sequence[Caller]) -> None:
        super().__init__()
        self.models, self.limits, self.callers = models, limits, callers
        self.queue = Queue(limits, SLOTS)
        self.now = self.turn = 0.0
        self.runs = 0
        self.tickets: list[Ticket] = []
        self.known: list[Batch] = []
        self.on_threads: list[Batch] = []
        self.inline: Batch | None = None
        # The inline thread has submitted, runs a batch inline or has ended that, and will ask next. Another
        # thread has submitted since the queue was empty, whose request must not wait for the inline run.
        self.inline_will_ask = self.another_submitted = False

    @property
    def waiting(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets if ticket.waits]

    @rule(
        model=st.integers(0, 3),
        lengths=lengths_of_a_request,
        return_weights=st.booleans(),
        kind=st.sampled_from([None, MaskKind.KEYS]),
        seconds=st.sampled_from([math.inf, math.inf, 0.0, 2.0, 5.0]),
        inline=st.booleans(),
        data=st.data(),
    )
    def submit(
        self,
        model: int,
        lengths: list[tuple[int, int]],
        return_weights: bool,
        kind: MaskKind | None,
        seconds: float,
        inline: bool,
        data: st.DataObject,
    ) -> None:
        options: dict[str, Any] = {"kind": kind, "return_weights": return_weights}
        request = validated_of(self.models[model], lengths, deadline=self.now + seconds, **options)
        request.caller = data.draw(st.sampled_from(self.callers))
        inline = inline and self.inline is None
        before, turn = sum(ticket.turn <= self.turn for ticket in self.waiting), self.turn
        self.queue.add(request, self.now, inline=inline)
        self.inline_will_ask = self.inline_will_ask or inline
        self.another_submitted = self.another_submitted or not inline
        graph = request.plan.graph
        sizes = [request.model.run_size(graph, 1, each.lengths, each.lengths[0]) for each in request.asked]
        alone = [request.model.seconds(graph, *size) for size in sizes]
        for index, own in enumerate(alone):
            self.tickets.append(Ticket(request, index, own, max(alone), turn, before, self.runs))
            turn += own

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(self.waiting)).request, None)

    def _end(self, request: Sample, outcome: Result | DeadlineExceededError | None) -> None:
        assert self.queue.release(request)
        request.end(outcome)
        assert not self.queue.release(request)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.inline is None)
    @rule()
    def ask_inline(self) -> None:
        self.inline_will_ask = False
        self.inline = self._asked(self.queue.next_inline(self.now, INLINE_SECONDS))
        self.inline_will_ask = self.inline is not None

    @precondition(lambda self: self.queue.needs_thread)
    @rule()
    def ask_on_a_thread(self) -> None:
        batch = self._asked(self.queue.next(self.now))
        if batch is not None:
            self.on_threads.append(batch)

    def _asked(self, found: Next) -> Batch | None:
        """Checks what was taken out of the queue, to run at once or to be handed over."""
        wanted = [ticket for ticket in self.waiting if ticket.is_in_time(self.now)]
        wanted.sort(key=lambda ticket: ticket.turn)  # which keeps the order of arrival within a turn
        for taken in self.queue.running:
            if taken not in self.known:
                self.known.append(taken)
                self._check_limits(taken)
                self._check_order(taken, wanted)
        batch, expired = found
        for request in expired:
            assert isinstance(request, Sample)
            assert not any(
                ticket.is_in_time(self.now) for ticket in self.tickets if ticket.request is request
            )
            self._end(request, DeadlineExceededError("too late"))
        return batch

    def _check_limits(self, batch: Batch) -> None:
        model, count = batch.model, len(batch)
        ((_, own_graph),) = {(queued.request.model, queued.request.plan.graph) for queued in batch}
        assert count <= (1 if model.manifest.runs_alone else self.limits.max_batch_sequences)
        longest = tuple(map(max, zip(*[queued.lengths for queued in batch], strict=True)))
        size = model.run_size(batch.graph, count, longest, sum(queued.lengths[0] for queued in batch))
        assert (batch.rows, batch.run_bytes) == (count * sum(size[1]), model.run_bytes(batch.graph, *size))
        assert count == 1 or batch.rows <= self.limits.max_batch_rows
        assert count == 1 or batch.run_bytes <= self.limits.max_batch_bytes
        equal_lengths = len({queued.lengths for queued in batch}) == 1
        assert batch.graph is (own_graph if equal_lengths else model.mixed_graph(own_graph))
        assert math.isclose(batch.seconds, model.seconds(batch.graph, *size), rel_tol=1e-12)
        assert batch.seconds <= sum(queued.plan.seconds for queued in batch) * (1 + 1e-9)

    def _check_order(self, batch: Batch, wanted: list[Ticket]) -> None:
        """What is not wanted, as it has run, is not found."""
        by_sequence = {(ticket.request, ticket.index): ticket for ticket in wanted}
        tickets = [by_sequence[queued.request, queued.index] for queued in batch]  # type: ignore[index]
        if len(self.callers) == 1:
            self.turn = max(self.turn, batch.sequences[0].start_tag)
            assert tickets[0] is wanted[0]
            # The first sequence of a request waits at most for those whose turn had come when it arrived.
            assert all(t.index or self.runs - t.runs_before <= t.sequences_before for t in tickets)
        self.runs += 1
        for ticket in tickets:
            ticket.runs += 1

    @precondition(lambda self: self.on_threads)
    @rule(data=st.data())
    def end_on_a_thread(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.on_threads))
        self.on_threads.remove(batch)
        self._ended(batch)

    @precondition(lambda self: self.inline is not None)
    @rule()
    def end_inline(self) -> None:
        assert self.inline is not None
        self._ended(self.inline)
        self.inline, self.inline_will_ask = None, True

    def _ended(self, batch: Batch) -> None:
        self.queue.end_batch(batch, self.now)
        for queued in batch:
            request = queued.request
            assert isinstance(request, Sample)
            request.unfinished_sequences -= 1
            if not request.unfinished_sequences and not request.is_done:
                self._end(request, Result({}))

    @invariant()
    def nothing_waits_while_a_slot_is_free(self) -> None:
        self.another_submitted = self.another_submitted and bool(self.queue)
        is_left_to_inline = self.inline_will_ask and not self.another_submitted
        if not self.queue or len(self.queue.running) >= SLOTS or is_left_to_inline:
            return
        free = self.limits.max_run_bytes - sum(self.queue.running.values())
        first = self.queue._next_bucket()[0]
        if first.plan.run_bytes <= free or not self.queue.running:
            assert self.queue.needs_thread

    @invariant()
    def the_memory_of_runs_is_bounded(self) -> None:
        running = self.queue.running
        assert len(running) <= SLOTS
        assert len(running) <= 1 or sum(running.values()) <= self.limits.max_run_bytes

    @invariant()
    def what_is_queued_is_counted(self) -> None:
        assert self.queue.sequences == len(self.waiting)
        queued_at = [ticket.request.queued_at for ticket in self.waiting]
        assert self.queue.oldest == min(queued_at, default=None)
        work = sum(ticket.seconds for ticket in self.waiting)
        work += sum(batch.seconds_alone for batch in self.queue.running)
        assert math.isclose(self.queue.work, work, abs_tol=1e-6)

    def teardown(self) -> None:
        """Without further submissions everything runs or expires, and the queue completes."""
        self.queue.close()
        for _ in range(4 * len(self.tickets) + SLOTS):
            if self.inline:
                self.end_inline()
            if self.queue.needs_thread and not self.queue.is_complete:
                self.ask_on_a_thread()
            for batch in self.on_threads[:1]:
                self.on_threads.remove(batch)
                self._ended(batch)
        assert self.queue.is_complete
        assert (self.queue.sequences, self.queue.work) == (0, 0.0)
        for ticket in self.tickets:
            assert ticket.request.is_done
            assert ticket.runs == 1 or not isinstance(ticket.request.outcome, Result)


# A call costs as much as a few rows, so that some lengths gain together and others lose.
MIXED = RunCost(fixed=1.0, row=3e-4, pair=3e-4)


@pytest.fixture
def buckets(self_model: LoadedModel, cross_model: LoadedModel) -> list[LoadedModel]:
    """Models that differ in who may join a run."""
    lowered = self_model.manifest.model_copy(update={"precision": "int8"})
    return [
        costing(self_model, SAME_FOR_ALL),
        costing(self_model, MIXED),
        on_device(costing(cross_model, MIXED)),
        dataclasses.replace(costing(self_model, MIXED), manifest=lowered),
    ]


@pytest.mark.parametrize("callers", [CALLERS[:1], CALLERS], ids=["one caller", "three callers"])
@pytest.mark.parametrize(
    ("long_runs", "look_ahead"),
    [(1, 256), (2, 2), pytest.param(100, 256, marks=pytest.mark.thorough)],
    ids=["one long run", "two, near", "many"],
)
def test_every_sequence_runs_once_in_time_and_in_a_free_slot(
    buckets: list[LoadedModel],
    self_model: LoadedModel,
    callers: list[Caller],
    long_runs: int,
    look_ahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queues, "LOOK_AHEAD", look_ahead)
    memory = long_runs * self_model.run_bytes(GraphKind.PLAIN, 1, (LONG,))
    limits = Limits(
        max_batch_sequences=4, max_batch_rows=3 * LONG, max_batch_bytes=20_000, max_run_bytes=memory
    )
    machine: Any = partial(QueueMachine, buckets, limits, callers)  # the stubs ask for a class
    run_state_machine_as_test(
        machine, settings=settings(max_examples=100, stateful_step_count=50, deadline=None)
    )


@pytest.mark.parametrize(
    ("requests", "expected"),
    [([1] * 9, [4, 4, 1]), ([9], [9]), ([9, 3], [11, 1])],
    ids=["of many requests", "of one request", "of two in turns"],
)
def test_a_full_batch_is_complete(self_model: LoadedModel, requests: list[int], expected: list[int]) -> None:
    rows, _ = self_model.operations(1, (4,))
    one = RunCost(fixed=1, row=(FULL_AT_FIXED_COSTS / 4) / rows, pair=0)
    queue = Queue(Limits())
    model = costing(self_model, one)
    for count in requests:
        queue.add(validated_of(model, [(4, 4)] * count), 0)
    # Beside its call, each sequence costs a quarter of what is enough.
    assert [len(batch.sequences) for batch in iter(lambda: take(queue)[0], None)] == expected


@given(
    lengths=st.lists(st.sampled_from([1, 1, 1, 4]), min_size=1, max_size=40),
    call_rows=st.sampled_from([0, 0.1, 0.3, 1, 1e3]),
    most=st.integers(1, 9),
    fitting=st.integers(1, 9),
    most_rows=st.integers(1, 9),
    slots=st.integers(1, 4),
)
def test_sequences_that_are_taken_together_are_those_that_would_be_taken_one_by_one(
    self_model: LoadedModel,
    lengths: list[int],
    call_rows: float,
    most: int,
    fitting: int,
    most_rows: int,
    slots: int,
) -> None:
    rows, _ = self_model.operations(1, (1,))
    model = costing(self_model, RunCost(fixed=call_rows, row=1 / rows, pair=0))
    most_bytes = model.run_bytes(GraphKind.PLAIN, fitting, (1,))
    limits = Limits(max_batch_sequences=most, max_batch_rows=most_rows, max_batch_bytes=most_bytes)

    def batches(*, alike: bool) -> list[Batch]:
        queue = Queue(limits, slots)
        for length in lengths:
            request = validated_of(model, [(length, length)])
            if not alike:  # equal shapes, none of which is another's
                request.sequences[0].plan = request.sequences[0].plan._replace()
            queue.add(request, 0)
        return list(iter(lambda: take(queue)[0], None))

    for batch, other in zip(batches(alike=True), batches(alike=False), strict=True):
        assert [own.request.number for own in batch] == [own.request.number for own in other]
        assert batch.seconds == pytest.approx(other.seconds)
        assert batch.seconds_alone == pytest.approx(other.seconds_alone)
