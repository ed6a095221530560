"""The rules of the queue: when a batch is due, which sequences join it, and how bytes are counted."""

import dataclasses

import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validated_request import SequenceInputs, ValidatedRequest
from attention_serving.server.engine.run.cost import RunCost
from attention_serving.server.engine.schedule import queue as queues
from attention_serving.server.engine.schedule.batch import Batch
from attention_serving.server.engine.schedule.queue import Queue
from tests.server.samples import CROSS, SELF, validated_of
from tests.server.seams import SAME_FOR_ALL, costing, take


@pytest.fixture
def model(self_model: LoadedModel) -> LoadedModel:
    return costing(self_model, SAME_FOR_ALL)


def queue_of(limits: Limits, *requests: ValidatedRequest) -> Queue:
    """A queue of requests that arrived one second apart."""
    queue = Queue(limits)
    for second, request in enumerate(requests):
        queue.add(request, float(second))
    return queue


def requests_of(model: LoadedModel, *lengths: int) -> list[ValidatedRequest]:
    return [validated_of(model, [(length, length)], seed=seed) for seed, length in enumerate(lengths)]


def next_lengths(queue: Queue) -> list[int]:
    batch, _ = take(queue)
    return [queued.lengths[0] for queued in batch] if batch else []


def test_an_empty_queue_has_no_batch() -> None:
    queue = Queue(Limits())
    assert not queue
    assert take(queue) == (None, [])


def test_sequences_nearest_in_length_join_first_and_the_rest_keep_their_order(model: LoadedModel) -> None:
    queue = queue_of(Limits(max_batch_sequences=3), *requests_of(model, 5, 9, 2, 6, 8, 5, 1))
    assert [next_lengths(queue) for _ in range(4)] == [[5, 5, 6], [9, 8, 2], [1], []]


def test_only_a_window_behind_the_oldest_is_considered(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "LOOK_AHEAD", 2)
    queue = queue_of(Limits(max_batch_sequences=3), *requests_of(model, 5, 9, 8, 5, 5))
    assert next_lengths(queue) == [5, 8, 9]


@pytest.mark.parametrize(
    ("name", "expected"),
    [(CROSS, [[5, 5], [4], []]), (SELF, [[5, 5, 4], [], []])],
    ids=["sees padding", "causal"],
)
def test_a_model_that_sees_padding_pays_for_the_lengths_graph(
    models: dict[str, LoadedModel], name: str, expected: list[list[int]]
) -> None:
    model = costing(models[name], SAME_FOR_ALL)
    dear = {**model.costs, GraphKind.LENGTHS: RunCost(call=2.5, row=0, pair=0)}
    queue = queue_of(Limits(), *requests_of(dataclasses.replace(model, costs=dear), 5, 4, 5))
    assert [next_lengths(queue) for _ in range(3)] == expected


def test_without_a_lengths_graph_only_equal_lengths_run_together(model: LoadedModel) -> None:
    graphs = {kind: graph for kind, graph in model.manifest.graphs.items() if kind is not GraphKind.LENGTHS}
    manifest = model.manifest.model_copy(update={"graphs": graphs})
    queue = queue_of(Limits(), *requests_of(dataclasses.replace(model, manifest=manifest), 5, 4, 5))
    assert [next_lengths(queue) for _ in range(3)] == [[5, 5], [4], []]


def test_an_expired_request_of_several_sequences_is_reported_once(model: LoadedModel) -> None:
    expired = validated_of(model, [(2, 2)] * 3, deadline=5)
    queue = queue_of(Limits(), expired, *requests_of(model, 4))
    batch, reported = take(queue, 5)
    assert reported == [expired]
    assert batch is not None
    assert [queued.lengths for queued in batch] == [(4, 4)]
    assert take(queue, 5) == (None, [])


def test_a_request_may_be_released_twice(model: LoadedModel) -> None:
    first, second = requests_of(model, 5, 5)
    queue = Queue(Limits())
    for request in (first, second):
        queue.add(request, 0)
    assert [queue.release(first) for _ in range(2)] == [True, False]
    assert next_lengths(queue) == [5]
    assert not queue


def test_a_released_request_does_not_run(model: LoadedModel, cross_model: LoadedModel) -> None:
    gone, kept, alone = *requests_of(model, 5, 4), *requests_of(cross_model, 3)
    queue = Queue(Limits())
    for request in (gone, kept, alone):
        queue.add(request, 0)
    for request in (gone, alone):
        queue.release(request)
    assert [next_lengths(queue) for _ in range(2)] == [[4], []]


def test_a_small_request_does_not_wait_for_the_rest_of_a_large_one(self_model: LoadedModel) -> None:
    model = costing(self_model, RunCost(call=0, row=1, pair=0))
    large, small = validated_of(model, [(5, 5)] * 9), validated_of(model, [(2, 2)])
    queue = queue_of(Limits(max_batch_sequences=1), large)
    assert next_lengths(queue) == [5]
    assert next_lengths(queue) == [5]
    queue.add(small, 0)
    assert [next_lengths(queue) for _ in range(2)] == [[2], [5]]


def test_two_large_requests_take_turns(self_model: LoadedModel) -> None:
    model = costing(self_model, RunCost(call=0, row=1, pair=0))
    queue = queue_of(
        Limits(max_batch_sequences=1), *(validated_of(model, [(size, size)] * 3) for size in (5, 4))
    )
    assert [next_lengths(queue) for _ in range(6)] == [[5], [4], [4], [5], [4], [5]]


def test_work_before_a_request_leaves_out_the_rest_of_large_ones(self_model: LoadedModel) -> None:
    model = costing(self_model, RunCost(call=1, row=0, pair=0))
    queue = queue_of(Limits(), validated_of(model, [(5, 5)] * 9), validated_of(model, [(2, 2)]))
    assert queue.work == 10
    assert [queue.work_before(own) for own in (0, 2, 8, 100)] == [2, 4, 10, 10]


def test_several_of_similar_lengths_pay_for_the_lengths_graph_together(cross_model: LoadedModel) -> None:
    model = costing(cross_model, RunCost(call=1, row=0, pair=0))
    dear = {**model.costs, GraphKind.LENGTHS: RunCost(call=3.5, row=0, pair=0)}
    model = dataclasses.replace(model, costs=dear)
    for lengths, expected in (([5, 4, 6], [5]), ([5, 4, 6, 3], [5, 4, 6, 3])):
        assert next_lengths(queue_of(Limits(), *requests_of(model, *lengths))) == expected


def test_what_would_cost_more_than_it_saves_is_left_out_of_a_mixed_batch(self_model: LoadedModel) -> None:
    rows, _ = self_model.operations(1, 1, 1)
    model = costing(self_model, RunCost(call=10, row=1 / rows, pair=0))
    queue = queue_of(Limits(), *requests_of(model, 20, 21, 70, 19, 18))
    assert [next_lengths(queue) for _ in range(2)] == [[20, 21, 19, 18], [70]]


def test_the_search_ends_after_a_few_that_would_lose(
    self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = self_model.operations(1, 1, 1)
    model = costing(self_model, RunCost(call=4, row=1 / rows, pair=0))
    queue = queue_of(Limits(), *requests_of(model, 50, *range(1, 31)))
    tried: list[int] = []

    def noted(batch: Batch, sequence: SequenceInputs) -> float | None:
        tried.append(sequence.lengths[0])
        return pad(batch, sequence)

    pad = Batch._pad
    monkeypatch.setattr(Batch, "_pad", noted)
    assert next_lengths(queue) == [50]
    assert tried == [30, 29, 28, 27]
