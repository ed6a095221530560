"""How runs share the threads: each on one under load, one on all if it is alone, and no thread idle."""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run.calibration import calibrated
from attention_serving.server.engine.run.cost import RunCost
from attention_serving.server.engine.run.execute import run_batch
from attention_serving.server.engine.run.provider import Device, Provider
from attention_serving.server.engine.schedule.batch import Batch
from attention_serving.server.engine.schedule.queue import Queue
from tests.server.samples import SELF, validated_of
from tests.server.seams import costing, deliver

# What runs of a module of 768 x 12 cost on one core of a server: seconds for a run, a row, a pair of rows.
CALL, ROW, PAIR = 6e-5, 45e-6, 1e-7
ALONE, ROWS = 512, 1


@pytest.fixture
def model(self_model: LoadedModel) -> LoadedModel:
    """A model whose runs cost that, and on all threads half of it."""
    row, pair = self_model.operations(1, 1, 0)[0], self_model.operations(1, 1, 1)[1]
    cost = RunCost(CALL, ROW / row, PAIR / pair)
    halved = RunCost(CALL, cost.row / 2, cost.pair / 2)
    return dataclasses.replace(costing(self_model, cost), parallel_costs={GraphKind.PLAIN: halved})


def next_batch(queue: Queue) -> Batch:
    batch, _ = queue.next(0.0)
    assert batch is not None
    return batch


def queue_of(model: LoadedModel, *lengths: int, slots: int = 2) -> Queue:
    queue = Queue(Limits(), slots)
    for length in lengths:
        queue.add(validated_of(model, [(length, length)]), 0.0, inline=False)
    return queue


def test_a_run_that_is_alone_uses_all_threads(model: LoadedModel) -> None:
    batch = next_batch(queue_of(model, ALONE))
    assert batch.is_parallel
    assert batch.seconds == model.parallel_seconds(GraphKind.PLAIN, 1, ALONE, ALONE)


@pytest.mark.parametrize("others", [(ALONE,), (ALONE // 2, ALONE)], ids=["another", "a shorter one"])
def test_a_run_that_is_not_alone_uses_one_thread(model: LoadedModel, others: tuple[int, ...]) -> None:
    queue = queue_of(model, ALONE, *others)
    assert [next_batch(queue).is_parallel for _ in range(2)] == [False, False]


def test_a_long_run_does_not_give_up_its_threads_for_a_short_one(model: LoadedModel) -> None:
    assert next_batch(queue_of(model, ALONE, 1)).is_parallel


def test_a_run_that_does_not_gain_uses_one_thread(model: LoadedModel) -> None:
    same = dataclasses.replace(model, parallel_costs=model.costs)
    assert not next_batch(queue_of(same, ALONE)).is_parallel
    unmeasured = dataclasses.replace(model, parallel_costs={})
    assert not next_batch(queue_of(unmeasured, ALONE)).is_parallel


@pytest.mark.parametrize(("slots", "expected"), [(1, [12]), (2, [6, 6])])
def test_free_slots_share_the_queue(model: LoadedModel, slots: int, expected: list[int]) -> None:
    queue = queue_of(model, *[ROWS] * 12, slots=slots)
    assert [len(next_batch(queue)) for _ in expected] == expected


def test_what_takes_little_more_than_the_call_itself_is_not_divided(model: LoadedModel) -> None:
    costly = costing(model, dataclasses.replace(model.cost(GraphKind.PLAIN), call=1.0))
    assert len(next_batch(queue_of(costly, *[ROWS] * 16, slots=4))) == 16


@dataclass
class Simulation:
    """Callers that keep a number of requests in flight, and slots that take what is expected of each run."""

    model: LoadedModel
    slots: int
    now: float = 0.0
    busy: float = 0.0
    work: float = 0.0
    parallel: int = 0
    waits: list[float] = field(default_factory=list)
    _running: list[tuple[float, int, Batch]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queue = Queue(Limits(), self.slots)
        self._rng = np.random.default_rng(self.slots)
        self._order = itertools.count()

    def run(self, in_flight: int, seconds: float) -> None:
        for _ in range(in_flight):
            self._submit()
        while self.now < seconds:
            while (batch := self._queue.next(self.now)[0]) is not None:
                self._start(batch)
            self.now, _, ended = heapq.heappop(self._running)
            self._queue.ended(ended, self.now)
            for queued in ended:
                if deliver(queued, {}):
                    assert self._queue.release(queued.request)
                    self._submit()

    def _submit(self) -> None:
        """One sequence of 1 to 512 rows; in one of twenty requests, 64 of them."""
        lengths = self._rng.integers(1, 513, 1 if self._rng.random() > 0.05 else 64)
        self._queue.add(validated_of(self.model, [(n, n) for n in lengths.tolist()]), self.now, inline=False)

    def _start(self, batch: Batch) -> None:
        heapq.heappush(self._running, (self.now + batch.seconds, next(self._order), batch))
        self.busy += batch.seconds
        self.work += batch.seconds_alone
        self.parallel += batch.is_parallel
        self.waits += [self.now - queued.request.queued_at for queued in batch if queued.request.missing == 1]


@pytest.mark.parametrize("slots", [2, 4, 16, 64])
def test_under_mixed_load_no_slot_is_idle_and_no_request_starves(model: LoadedModel, slots: int) -> None:
    simulation = Simulation(model, slots)
    simulation.run(in_flight=4 * slots, seconds=3.0)
    running = simulation.slots * simulation.now
    assert simulation.busy >= 0.95 * running
    # Runs never take longer together than they would one by one.
    assert simulation.work >= 0.95 * running
    assert simulation.parallel == 0
    assert max(simulation.waits) < 1.0


def test_sessions_on_all_threads_give_the_same_results(artifacts: Path) -> None:
    folder = artifacts / SELF / "1"
    model = calibrated(load_model(folder, Device(Provider.CPU, threads=2)))
    assert set(model.parallel_sessions) == set(model.sessions) - {GraphKind.LENGTHS}
    assert set(model.parallel_costs) == set(model.parallel_sessions)
    request = validated_of(model, [(7, 7)])
    one, all_threads = (
        run_batch(model, GraphKind.PLAIN, request.sequences, parallel=parallel)[0]
        for parallel in (False, True)
    )
    np.testing.assert_allclose(values(one[0]), values(all_threads[0]), rtol=1e-5, atol=1e-6)


def test_one_thread_needs_no_second_session(artifacts: Path) -> None:
    model = load_model(artifacts / SELF / "1", Device(Provider.CPU, threads=1))
    assert not model.parallel_sessions
    assert model.parallel_seconds(GraphKind.PLAIN, 1, 6, 6) == math.inf


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (Device(threads=1), 2),
        (Device(threads=16), 16),
        (Device(Provider.CUDA, threads=16), 2),
    ],
    ids=["one thread", "many", "not on the host"],
)
def test_as_many_runs_as_threads(device: Device, expected: int) -> None:
    assert device.parallel_runs == expected


def values(outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    return outputs["context_vectors"]
