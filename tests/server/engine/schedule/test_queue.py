"""Under any order of requests each sequence runs once, within the limits, and after a bounded wait.

Every batch contains the oldest queued sequence, so a sequence waits at most for as many runs as there were
sequences before it when it arrived.
"""

import dataclasses
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.cost import RunCost
from attention_serving.server.engine.schedule import queue as queues
from attention_serving.server.engine.schedule.batch import FULL_AT_CALL_COSTS, Batch
from attention_serving.server.engine.schedule.queue import Queue
from tests.server.engine.schedule.queue_machine import QueueMachine
from tests.server.samples import validated_of
from tests.server.seams import SAME_FOR_ALL, costing, take

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


@pytest.mark.parametrize("look_ahead", [2, 256], ids=["near", "far"])
def test_every_sequence_runs_once_and_in_time(
    buckets: list[LoadedModel], look_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "LOOK_AHEAD", look_ahead)
    machine: Any = partial(QueueMachine, buckets, LIMITS)  # the stubs ask for a class
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=80, stateful_step_count=40, deadline=None),
    )


def test_the_models_differ_in_what_may_join(buckets: list[LoadedModel]) -> None:
    def sizes(model: LoadedModel) -> list[int]:
        queue = Queue(Limits())
        queue.add(validated_of(model, [(40, 40), (1, 1), (40, 40)]), 0)
        return [len(batch.sequences) for batch in iter(lambda: take(queue)[0], None)]

    assert [sizes(model) for model in buckets] == [[3], [2, 1], [2, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("requests", "expected"), [([1] * 9, [4, 4, 1]), ([9], [9])], ids=["of many requests", "of one request"]
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
