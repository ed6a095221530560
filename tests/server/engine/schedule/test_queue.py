"""Under any order of requests each sequence runs once, within the limits, and after a bounded wait.

Every batch contains the oldest queued sequence, so a sequence waits at most for as many runs as there were
sequences before it when it arrived.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
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
from attention_serving.server.engine.errors import DeadlineExceededError, EngineError, RunFailedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validated_request import SequenceInputs, ValidatedRequest
from attention_serving.server.engine.run.execute import gather
from attention_serving.server.engine.schedule import queue as queues
from attention_serving.server.engine.schedule.batch import FULL_AT_CALL_COSTS, Batch
from attention_serving.server.engine.schedule.queue import Queue
from attention_serving.server.engine.types import MaskKind, Result, RunCost
from tests.server.samples import Sample, validated_of
from tests.server.seams import SAME_FOR_ALL, costing, deliver, take

LONG, SHORT = 40, 6
one_long_among_short = st.tuples(
    st.lists(st.tuples(st.integers(1, SHORT), st.integers(1, SHORT)), max_size=5),
    st.sampled_from([(1, 1), (SHORT, SHORT), (LONG, 1), (LONG, LONG)]),
).map(lambda drawn: [*drawn[0], drawn[1]])
lengths_of_a_request = one_long_among_short.flatmap(st.permutations)
patience = st.sampled_from([math.inf, math.inf, 0.0, 2.0, 5.0])


def seconds_alone(request: Sample) -> list[float]:
    """Expected duration of a run of each sequence alone."""
    lengths = [sequence.lengths for sequence in request.asked]
    return [request.model.seconds(request.form.graph, 1, *pair) for pair in lengths]


@dataclass(eq=False)
class Ticket:
    """One sequence: its request, its turn, what was queued before it, and how often it ran."""

    request: Sample
    index: int
    turn: float
    sequences_before: int
    runs_before: int
    runs: int = 0

    def is_wanted(self, now: float) -> bool:
        longest = max(seconds_alone(self.request))
        return not self.request.is_done and now + longest <= self.request.deadline


class QueueMachine(RuleBasedStateMachine):
    """Does with a queue what the scheduler does, its runs without a runtime."""

    def __init__(self, models: Sequence[LoadedModel], limits: Limits) -> None:
        super().__init__()
        self.models = models
        self.limits = limits
        self.queue = Queue(limits)
        self.now = 0.0
        self.runs = 0
        self.turn = 0.0
        self.requests: list[Sample] = []
        self.waiting: list[Ticket] = []
        self.tickets: list[Ticket] = []
        self.expired: Counter[ValidatedRequest] = Counter()
        self.failed: set[ValidatedRequest] = set()
        self.withdrawn: set[ValidatedRequest] = set()
        self.batch: Batch | None = None

    @property
    def live(self) -> list[Sample]:
        return [request for request in self.requests if not request.is_done]

    def _end(self, request: ValidatedRequest, outcome: Result | EngineError | None) -> None:
        assert self.queue.release(request)
        request.end(outcome)
        assert not self.queue.release(request)

    @rule(
        model=st.integers(0, 3),
        lengths=lengths_of_a_request,
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
        request = validated_of(
            self.models[model], lengths, kind=kind, return_weights=return_weights, deadline=deadline
        )
        self.queue.add(request, self.now)
        before = sum(not t.request.is_done and t.turn <= self.turn for t in self.waiting)
        turn, new = self.turn, []
        for index, own in enumerate(seconds_alone(request)):
            new.append(Ticket(request, index, turn, before, self.runs))
            turn += own
        self.requests.append(request)
        self.waiting += new
        self.tickets += new

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.withdrawn.add(request)
        self._end(request, None)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.batch is None)
    @rule()
    def take(self) -> None:
        wanted = [ticket for ticket in self.waiting if ticket.is_wanted(self.now)]
        wanted.sort(key=lambda ticket: ticket.turn)  # which keeps the order of arrival within a turn
        batch, expired = take(self.queue, self.now)
        assert (batch is None) == (not wanted)
        if batch is not None:
            head = batch.sequences[0]
            self.turn = max(self.turn, head.turn)
            assert (head.request, head.index) == (wanted[0].request, wanted[0].index)
            self._check_limits(batch)
            self._note_runs(batch)
        for request in expired:
            assert isinstance(request, Sample)
            assert request.deadline < self.now + max(seconds_alone(request))
            self.expired[request] += 1
            self._end(request, DeadlineExceededError("too late"))
        self.batch = batch

    def _check_limits(self, batch: Batch) -> None:
        model, count = batch.model, len(batch)
        ((_, own_graph),) = {(queued.request.model, queued.request.form.graph) for queued in batch}
        assert count <= (1 if model.manifest.runs_alone else self.limits.max_batch_sequences)
        longest = (max(e.lengths[0] for e in batch), max(e.lengths[1] for e in batch))
        assert count == 1 or model.run_bytes(batch.graph, count, *longest) <= self.limits.max_batch_bytes
        equal_lengths = len({queued.lengths for queued in batch}) == 1
        assert batch.graph is (own_graph if equal_lengths else model.mixed_graph(own_graph))
        alone = sum(model.seconds(batch.graph, 1, *queued.lengths) for queued in batch)
        assert math.isclose(batch.seconds, model.seconds(batch.graph, count, *longest), rel_tol=1e-12)
        assert batch.seconds <= alone * (1 + 1e-9)

    def _note_runs(self, batch: Batch) -> None:
        for queued in batch:
            ticket = next(t for t in self.waiting if (t.request, t.index) == (queued.request, queued.index))
            assert ticket.is_wanted(self.now)
            # The first sequence of a request waits at most for those whose turn had come when it arrived.
            assert ticket.index or self.runs - ticket.runs_before <= ticket.sequences_before
            ticket.runs += 1
            self.waiting.remove(ticket)
        self.runs += 1

    @precondition(lambda self: self.batch is not None)
    @rule()
    def finish(self) -> None:
        for queued in self._ended():
            self._deliver(queued)

    @precondition(lambda self: self.batch is not None)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        sequences = self._ended()
        at_fault = data.draw(st.integers(0, len(sequences) - 1))
        for index, queued in enumerate(sequences):
            if queued.request.is_done:
                continue
            if index == at_fault:
                self.failed.add(queued.request)
                self._end(queued.request, RunFailedError("no"))
            else:
                self._deliver(queued)

    def _ended(self) -> list[SequenceInputs]:
        assert self.batch is not None
        batch, self.batch = self.batch, None
        return batch.sequences

    def _deliver(self, queued: SequenceInputs) -> None:
        request = queued.request
        assert isinstance(request, Sample)
        marker = np.array([self.requests.index(request), queued.index])
        if deliver(queued, {"context_vectors": marker}) and not request.is_done:
            self._end(request, Result(gather(request.results)))

    @invariant()
    def counts_what_is_queued(self) -> None:
        """A sequence whose request has ended may stay in the queue until it is found there."""
        queued = [sequence for bucket in self.queue._buckets.values() for sequence in bucket]
        assert self.queue.sequences == len(queued)
        assert math.isclose(self.queue.work, sum(s.shape.seconds for s in queued), abs_tol=1e-6)

    @invariant()
    def runs_nothing_twice(self) -> None:
        assert all(ticket.runs <= 1 for ticket in self.tickets)

    def teardown(self) -> None:
        while self.batch is not None or self.queue:
            if self.batch is not None:
                self.finish()
            self.take()
        assert self.batch is None
        for number, request in enumerate(self.requests):
            self._check_outcome(number, request)

    def _check_outcome(self, number: int, request: Sample) -> None:
        assert self.expired[request] <= 1
        assert request.is_done
        outcome = request.outcome
        if request in self.withdrawn:
            assert outcome is None
            return
        if not isinstance(outcome, Result):
            assert isinstance(outcome, RunFailedError if request in self.failed else DeadlineExceededError)
            assert self.expired[request] == (request not in self.failed)
            return
        assert all(ticket.runs == 1 for ticket in self.tickets if ticket.request is request)
        markers = outcome.outputs["context_vectors"]
        assert [marker.tolist() for marker in markers] == [[number, i] for i in range(len(request.asked))]


LIMITS = Limits(max_batch_sequences=4, max_batch_bytes=20_000)
# A call costs as much as a few rows, so that some lengths gain together and others lose.
MIXED = RunCost(call=1.0, row=3e-4, pair=3e-4)


@pytest.fixture
def buckets(self_model: LoadedModel, cross_model: LoadedModel) -> list[LoadedModel]:
    """Models that differ in who may join a run."""
    lowered = self_model.manifest.model_copy(update={"precision": "int8"})
    return [
        costing(self_model, SAME_FOR_ALL),
        costing(self_model, MIXED),
        costing(cross_model, MIXED),
        dataclasses.replace(costing(self_model, MIXED), manifest=lowered),
    ]


@pytest.mark.parametrize(
    ("look_ahead", "examples"),
    [(2, 20), pytest.param(256, 100, marks=pytest.mark.thorough)],
    ids=["near", "far"],
)
def test_every_sequence_runs_once_and_in_time(
    buckets: list[LoadedModel], look_ahead: int, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "LOOK_AHEAD", look_ahead)
    machine: Any = partial(QueueMachine, buckets, LIMITS)  # the stubs ask for a class
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None)
    )


@pytest.mark.parametrize(
    ("requests", "expected"),
    [([1] * 9, [4, 4, 1]), ([9], [9]), ([9, 3], [11, 1])],
    ids=["of many requests", "of one request", "of two in turns"],
)
def test_a_batch_with_little_to_gain_does_not_take_another_request(
    self_model: LoadedModel, requests: list[int], expected: list[int]
) -> None:
    rows, _ = self_model.operations(1, 4, 4)
    one = RunCost(call=1, row=(FULL_AT_CALL_COSTS / 4) / rows, pair=0)
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
    slots=st.integers(1, 4),
)
def test_sequences_that_are_taken_together_are_those_that_would_be_taken_one_by_one(
    self_model: LoadedModel, lengths: list[int], call_rows: float, most: int, fitting: int, slots: int
) -> None:
    rows, _ = self_model.operations(1, 1, 1)
    model = costing(self_model, RunCost(call=call_rows, row=1 / rows, pair=0))
    limits = Limits(max_batch_sequences=most, max_batch_bytes=model.run_bytes(GraphKind.PLAIN, fitting, 1, 1))

    def batches(*, alike: bool) -> list[Batch]:
        queue = Queue(limits, slots)
        for length in lengths:
            request = validated_of(model, [(length, length)])
            if not alike:  # equal shapes, none of which is another's
                request.sequences[0].shape = request.sequences[0].shape._replace()
            queue.add(request, 0)
        return list(iter(lambda: take(queue)[0], None))

    for batch, other in zip(batches(alike=True), batches(alike=False), strict=True):
        assert [own.request.number for own in batch] == [own.request.number for own in other]
        assert batch.seconds == pytest.approx(other.seconds)
        assert batch.seconds_alone == pytest.approx(other.seconds_alone)
