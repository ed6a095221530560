"""The queue's rules one by one: when a run is due, who joins it, and what is taken into account."""

import dataclasses
from concurrent.futures import Future

import pytest

from artifact.manifest import GraphKind
from server.engine import batch_queue
from server.engine.batch_queue import BatchQueue
from server.engine.cost import RunCost
from server.engine.errors import OverloadedError
from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.validation import ValidatedRequest
from tests.server.samples import CROSS, SELF, validated_of
from tests.server.seams import SAME_FOR_ALL, costing


@pytest.fixture
def model(self_model: LoadedModel) -> LoadedModel:
    return costing(self_model, SAME_FOR_ALL)


def queue_of(limits: Limits, *requests: ValidatedRequest) -> BatchQueue:
    """Works that came one second apart."""
    queue = BatchQueue(limits)
    for second, request in enumerate(requests):
        queue.add(request, float(second))
    return queue


def requests_of(model: LoadedModel, *lengths: int) -> list[ValidatedRequest]:
    return [validated_of(model, [(length, length)], seed=seed) for seed, length in enumerate(lengths)]


def next_lengths(queue: BatchQueue) -> list[int]:
    batch, _ = queue.next(0)
    return [queued.lengths[0] for queued in batch] if batch else []


def test_an_empty_queue_has_nothing_to_run() -> None:
    queue = BatchQueue(Limits())
    assert not queue
    assert queue.next(0) == (None, [])


def test_without_a_delay_a_run_is_due_at_once(model: LoadedModel) -> None:
    assert queue_of(Limits(), *requests_of(model, 1)).due(7) == 7


@pytest.mark.parametrize(("count", "due"), [(1, 5), (2, 5), (3, 2), (4, 2)])
def test_a_delay_counts_from_the_oldest_and_ends_when_its_lane_is_full(
    model: LoadedModel, count: int, due: float
) -> None:
    limits = Limits(batch_delay_seconds=5, max_batch_sequences=3)
    assert queue_of(limits, *requests_of(model, *[1] * count)).due(2) == due


def test_a_full_lane_waits_for_an_older_one(model: LoadedModel, cross_model: LoadedModel) -> None:
    limits = Limits(batch_delay_seconds=5, max_batch_sequences=2)
    queue = queue_of(limits, *requests_of(cross_model, 1), *requests_of(model, 1, 1))
    assert queue.due(2) == 5
    queue.next(2)
    assert queue.due(2) == 2


def test_the_nearest_in_length_join_first_and_the_others_keep_their_order(model: LoadedModel) -> None:
    queue = queue_of(Limits(max_batch_sequences=3), *requests_of(model, 5, 9, 2, 6, 8, 5, 1))
    assert [next_lengths(queue) for _ in range(4)] == [[5, 5, 6], [9, 8, 2], [1], []]


def test_company_is_looked_for_behind_the_oldest_only_so_far(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_queue, "LOOK_AHEAD", 2)
    queue = queue_of(Limits(max_batch_sequences=3), *requests_of(model, 5, 9, 8, 5, 5))
    assert next_lengths(queue) == [5, 8, 9]


@pytest.mark.parametrize(
    ("name", "expected"),
    [(CROSS, [[5, 5], [4], []]), (SELF, [[5, 5, 4], [], []])],
    ids=["sees padding", "does not"],
)
def test_who_sees_padding_pays_for_the_graph_of_mixed_lengths(
    models: dict[str, LoadedModel], name: str, expected: list[list[int]]
) -> None:
    model = costing(models[name], SAME_FOR_ALL)
    dear = {**model.costs, GraphKind.LENGTHS: RunCost(call=2.5, row=0, pair=0)}
    queue = queue_of(Limits(), *requests_of(dataclasses.replace(model, costs=dear), 5, 4, 5))
    assert [next_lengths(queue) for _ in range(3)] == expected


def test_a_model_without_a_graph_for_mixed_lengths_runs_equal_ones_together(model: LoadedModel) -> None:
    graphs = {kind: graph for kind, graph in model.manifest.graphs.items() if kind is not GraphKind.LENGTHS}
    manifest = model.manifest.model_copy(update={"graphs": graphs})
    queue = queue_of(Limits(), *requests_of(dataclasses.replace(model, manifest=manifest), 5, 4, 5))
    assert [next_lengths(queue) for _ in range(3)] == [[5, 5], [4], []]


def test_an_expired_work_of_several_sequences_is_reported_once(model: LoadedModel) -> None:
    expired = validated_of(model, [(2, 2)] * 3, deadline=5)
    queue = queue_of(Limits(), expired, *requests_of(model, 4))
    batch, reported = queue.next(5)
    assert reported == [expired]
    assert batch is not None
    assert [queued.lengths for queued in batch] == [(4, 4)]
    assert queue.next(5) == (None, [])


def test_a_work_may_be_released_twice(model: LoadedModel) -> None:
    first, second = requests_of(model, 5, 5)
    limits = Limits(max_in_flight_bytes=2 * first.in_flight_bytes)
    queue = BatchQueue(limits)
    number, _ = (queue.add(request, 0) for request in (first, second))
    for _ in range(2):
        queue.release(number)
    queue.add(dataclasses.replace(first, future=Future()), 0)
    with pytest.raises(OverloadedError):
        queue.add(dataclasses.replace(first, in_flight_bytes=1, future=Future()), 0)


def test_a_released_work_is_not_run(model: LoadedModel, cross_model: LoadedModel) -> None:
    gone, kept, alone = *requests_of(model, 5, 4), *requests_of(cross_model, 3)
    queue = BatchQueue(Limits())
    numbers = [queue.add(request, 0) for request in (gone, kept, alone)]
    for number in (numbers[0], numbers[2]):
        queue.release(number)
    assert [next_lengths(queue) for _ in range(2)] == [[4], []]


def test_a_refused_work_leaves_no_trace(model: LoadedModel) -> None:
    first, second = requests_of(model, 5, 5)
    queue = BatchQueue(Limits(max_in_flight_bytes=first.in_flight_bytes))
    number = queue.add(first, 0)
    with pytest.raises(OverloadedError):
        queue.add(second, 0)
    queue.release(number)
    assert not queue
    queue.add(second, 0)
    assert next_lengths(queue) == [5]
