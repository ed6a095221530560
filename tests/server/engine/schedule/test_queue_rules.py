"""The rules of the queue: what runs together, on which threads, whose turn it is, and what is refused."""

import dataclasses
import math
import time
from collections import Counter
from typing import Any

import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.budget import Caller
from attention_serving.server.engine.costs import Costs, Pace, RunCost
from attention_serving.server.engine.errors import OverloadedError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.request import Request
from attention_serving.server.engine.schedule import fair_shares
from attention_serving.server.engine.schedule.batch import Batch
from attention_serving.server.engine.schedule.fair_shares import FairShares
from attention_serving.server.engine.schedule.queue import WINDOW_SECONDS, LatencyEstimator, Queue
from tests.server.samples import CROSS, SELF, validated_of
from tests.server.seams import SAME_FOR_ALL, Held, costing, take


@pytest.fixture
def model(self_model: LoadedModel) -> LoadedModel:
    return costing(self_model, SAME_FOR_ALL)


def queue_of(limits: Limits, *requests: Request) -> Queue:
    """A queue of requests that arrived one second apart."""
    queue = Queue(limits)
    for second, request in enumerate(requests):
        queue.add(request, float(second))
    return queue


def requests_of(model: LoadedModel, *lengths: int) -> list[Request]:
    return [validated_of(model, [(length, length)], seed=seed) for seed, length in enumerate(lengths)]


def next_lengths(queue: Queue) -> list[int]:
    batch, _ = take(queue)
    return [queued.lengths[0] for queued in batch] if batch else []


def test_sequences_nearest_in_length_join_first_and_the_rest_keep_their_order(model: LoadedModel) -> None:
    queue = queue_of(Limits(max_batch_sequences=3), *requests_of(model, 5, 9, 2, 6, 8, 5, 1))
    assert [next_lengths(queue) for _ in range(4)] == [[5, 5, 6], [9, 8, 2], [1], []]


@pytest.mark.parametrize(
    ("name", "is_dear", "expected"),
    [(CROSS, True, [[5, 5], [4], []]), (SELF, True, [[5, 5, 4], [], []]), (SELF, False, [[5, 5], [4], []])],
    ids=["sees padding", "causal", "without lengths"],
)
def test_unequal_lengths_need_a_lengths_graph_that_is_worth_it(
    models: dict[str, LoadedModel], name: str, is_dear: bool, expected: list[list[int]]
) -> None:
    model, lengths = costing(models[name], SAME_FOR_ALL), GraphKind.LENGTHS
    if is_dear:
        runs = {**model.costs.run_costs, lengths: RunCost(fixed=2.5, row=0, pair=0)}
        model = dataclasses.replace(model, costs=Costs(runs))
    else:
        graphs = {kind: graph for kind, graph in model.manifest.graphs.items() if kind is not lengths}
        model = dataclasses.replace(model, manifest=model.manifest.model_copy(update={"graphs": graphs}))
    queue = queue_of(Limits(), *requests_of(model, 5, 4, 5))
    assert [next_lengths(queue) for _ in range(3)] == expected


def test_work_before_a_request_leaves_out_the_rest_of_large_ones(model: LoadedModel) -> None:
    queue = queue_of(Limits(), validated_of(model, [(5, 5)] * 9), validated_of(model, [(2, 2)]))
    assert queue.work == 10
    assert [queue.work_before(own) for own in (0, 2, 8, 100)] == [2, 4, 10, 10]


def test_a_request_that_would_be_late_is_refused_with_the_time_to_retry() -> None:
    with pytest.raises(OverloadedError, match=r"expected in 3\.00 s, .* deadline in 1\.00 s") as refused:
        LatencyEstimator().check(waiting=2.5, request_seconds=0.5, deadline=11.0, now=10.0)
    assert refused.value.retry_after == pytest.approx(3 - 0.9)


@pytest.mark.parametrize(
    ("waiting", "deadline"),
    [(0.8, 11.0), (0.0, 10.1), (100.0, math.inf), (100.0, 10.0), (100.0, 9.0)],
    ids=["in time", "nothing waits", "no deadline", "just expired", "long expired"],
)
def test_other_requests_are_admitted(waiting: float, deadline: float) -> None:
    LatencyEstimator().check(waiting=waiting, request_seconds=0.05, deadline=deadline, now=10.0)


@pytest.mark.parametrize("pause", [0, 100], ids=["busy", "idle between runs"])
def test_the_rate_follows_what_is_measured_while_busy(pause: float) -> None:
    latency, now = LatencyEstimator(), 0.0
    for _ in range(60):
        latency.record_start(now)
        now += 2 * WINDOW_SECONDS
        latency.record_end(work=6 * WINDOW_SECONDS, now=now, busy=not pause)
        now += pause
    assert latency.rate == pytest.approx(3, rel=1e-3)
    assert latency.seconds(6) == pytest.approx(2, rel=1e-3)


GREEDY, MODEST, HEAVY = Caller("greedy"), Caller("modest"), Caller("heavy", 3.0)
ONE_BY_ONE = Limits(max_batch_sequences=1)


@pytest.fixture
def by_row(self_model: LoadedModel) -> LoadedModel:
    """A model whose sequences cost what their rows do, and whose runs do not gain by more of them."""
    return costing(self_model, RunCost(fixed=0, row=1, pair=0))


def add(queue: Queue, model: LoadedModel, caller: Caller, *, count: int = 1, length: int = 2) -> None:
    """Adds requests of a caller, of one sequence each."""
    for _ in range(count):
        request = validated_of(model, [(length, length)])
        request.caller = caller
        queue.add(request, 0)


def served(queue: Queue, count: int) -> list[str]:
    """Names of the callers of the next runs."""
    batches = [take(queue)[0] for _ in range(count)]
    return [batch.sequences[0].request.caller.name for batch in batches if batch]


@pytest.mark.parametrize(
    ("other", "length", "runs"), [(GREEDY, 6, 10), (HEAVY, 2, 30)], ids=["by what they ran", "by weight"]
)
def test_callers_take_turns(by_row: LoadedModel, other: Caller, length: int, runs: int) -> None:
    queue = Queue(ONE_BY_ONE)
    add(queue, by_row, other, count=40, length=length)
    add(queue, by_row, MODEST, count=40)
    assert Counter(served(queue, 40))[other.name] == pytest.approx(runs, abs=1)


def test_a_share_that_was_not_used_is_not_saved_up(by_row: LoadedModel) -> None:
    queue = Queue(ONE_BY_ONE)
    add(queue, by_row, GREEDY, count=40)
    served(queue, 20)
    add(queue, by_row, MODEST, count=20)
    assert Counter(served(queue, 20))["greedy"] in (9, 10, 11)


def test_what_a_caller_ran_is_not_forgotten_while_it_has_nothing_queued(by_row: LoadedModel) -> None:
    queue, names = Queue(ONE_BY_ONE), []
    add(queue, by_row, MODEST, count=100)
    for _ in range(10):  # a request from time to time, which costs ten times as much
        add(queue, by_row, GREEDY, length=20)
        names += served(queue, 8)
    # Of 80 runs, 7 of ten times the cost are half of the work; all 10 would be more than that.
    assert Counter(names)["greedy"] in (6, 7, 8)


def test_a_deadline_is_predicted_for_the_caller(self_model: LoadedModel) -> None:
    with Held(self_model) as held:  # each run takes a second, of which one is under way
        for _ in range(50):
            request = validated_of(held.model, [(2, 2)])
            request.caller = GREEDY
            held.engine.submit(request)
        deadline = time.monotonic() + 10
        held.engine.check_deadline(deadline, MODEST)
        with pytest.raises(OverloadedError):
            held.engine.check_deadline(deadline, GREEDY)
        with pytest.raises(OverloadedError):
            held.submit([(2, 2)], deadline=time.monotonic() + 0.1)


def test_idle_callers_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_shares, "MAX_IDLE", 10)
    shares = FairShares()
    busy = shares.of(GREEDY)
    busy.sequences = 1
    for number in range(100):
        shares.of(Caller(f"caller-{number}"))
    assert len(shares._shares) <= 10
    assert shares.of(GREEDY) is busy


def test_sequences_of_several_callers_run_together(model: LoadedModel) -> None:
    queue = Queue(Limits(max_batch_sequences=8))
    for caller in (GREEDY, MODEST, HEAVY):
        add(queue, model, caller, count=2)
    batch, _ = take(queue)
    assert batch is not None
    assert Counter(own.request.caller.name for own in batch) == {"greedy": 2, "modest": 2, "heavy": 2}
    assert (bool(queue), queue.sequences, queue.work) == (False, 0, 0.0)


# What runs of a module of 768 x 12 cost on one core of a server: seconds for a run, a row, a pair of rows.
CALL, ROW, PAIR = 6e-5, 45e-6, 1e-7
ALONE, ROWS = 512, 1


@pytest.fixture
def large(self_model: LoadedModel) -> LoadedModel:
    """A model whose runs cost that, and on all threads half of it."""
    row, pair = self_model.operations(1, (1,))
    cost = RunCost(CALL, ROW / row, PAIR / pair)
    model, pace = costing(self_model, cost), Pace(has_all_threads=True)
    pace.observe(seconds := model.seconds(GraphKind.PLAIN, 1, (ALONE,)), seconds / 2, parallel=True)
    costs = dataclasses.replace(model.costs, paces={GraphKind.PLAIN: pace})
    return dataclasses.replace(model, costs=costs)


def next_batch(queue: Queue) -> Batch:
    batch, _ = queue.next(0.0)
    assert batch is not None
    return batch


def queue_in_slots(large: LoadedModel, *lengths: int, slots: int = 2) -> Queue:
    queue = Queue(Limits(), slots)
    for length in lengths:
        queue.add(validated_of(large, [(length, length)]), 0.0, inline=False)
    return queue


def test_a_run_uses_all_threads_if_it_is_alone_and_gains(large: LoadedModel) -> None:
    batch = next_batch(queue_in_slots(large, ALONE))
    assert batch.is_parallel
    assert batch.seconds == large.seconds(GraphKind.PLAIN, 1, (ALONE,)) / 2
    queue = queue_in_slots(large, ALONE, ALONE // 2)
    assert [next_batch(queue).is_parallel for _ in range(2)] == [False, False]
    assert next_batch(queue_in_slots(large, ALONE, 1)).is_parallel  # beside a very short one
    no_threads = {GraphKind.PLAIN: Pace(has_all_threads=False)}
    costs = dataclasses.replace(large.costs, paces=no_threads)
    model = dataclasses.replace(large, costs=costs)
    assert not next_batch(queue_in_slots(model, ALONE)).is_parallel


@pytest.mark.parametrize(("slots", "call", "expected"), [(1, CALL, [12]), (2, CALL, [6, 6]), (4, 1.0, [12])])
def test_free_slots_share_more_than_calls(large: LoadedModel, slots: int, call: float, expected: Any) -> None:
    """What takes little more than the call itself is not divided."""
    model = costing(large, dataclasses.replace(large.run_cost(GraphKind.PLAIN), fixed=call))
    queue = queue_in_slots(model, *[ROWS] * 12, slots=slots)
    assert [len(next_batch(queue)) for _ in expected] == expected
