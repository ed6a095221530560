"""A simulation of the scheduler on a device, where one run computes at a time, and on the cores of a host."""

import dataclasses
import math
from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np
import pytest

from attention_serving.server.engine.budget import Caller
from attention_serving.server.engine.costs import RunCost
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.request import Request
from attention_serving.server.engine.run.provider import Device, Provider
from attention_serving.server.engine.schedule.batch import Batch
from attention_serving.server.engine.schedule.queue import Queue
from tests.server.samples import validated_of
from tests.server.seams import costing, on_device

# What runs of a small encoder take on a large device, in seconds: a run, a row, a pair of rows.
CALL, ROW, PAIR = 2e-4, 1.5e-7, 1e-11
DEVICE, HOST = Device(Provider.CUDA), Device(Provider.CPU, threads=2)
LIMITS = Provider.CUDA.runtime.limits
GREEDY, MODEST = Caller("greedy"), Caller("modest")


class Simulation:
    """The queue, threads that take batches when it asks for them, and runs that take what is expected.

    Attributes:
        batches: In the order in which they were taken.
        ended: When each request had its result, in seconds.
        expired: The requests that were not answered.
    """

    def __init__(self, device: Device = DEVICE, limits: Limits = LIMITS) -> None:
        self.batches: list[Batch] = []
        self.ended: dict[Request, float] = {}
        self.expired: list[Request] = []
        self._queue = Queue(limits, device.parallel_runs, device.computing_runs)
        self._idle = device.computing_runs
        self._waiting = deque[Batch]()

    def run(self, arrivals: Iterable[tuple[float, Request]]) -> None:
        """Simulates until every request has ended. What arrives at one time is queued at once."""
        numbers = count()
        events: list[tuple[float, int, Request | Batch]]
        events = [(at, next(numbers), request) for at, request in arrivals]
        heapify(events)
        while events:
            now, _, event = heappop(events)
            if isinstance(event, Batch):
                self._end(event, now)
            else:
                self._queue.add(event, now)
            if events and events[0][0] == now:
                continue
            self._take(now)
            while self._waiting and self._idle:
                self._idle -= 1
                batch = self._waiting.popleft()
                heappush(events, (now + batch.seconds, next(numbers), batch))
        assert (self._queue.sequences, self._queue.work, self._waiting) == (0, 0.0, deque())

    def _take(self, now: float) -> None:
        while self._queue.needs_thread:
            batch, expired = self._queue.next(now)
            for request in expired:
                assert self._queue.release(request)
            self.expired += expired
            if batch is not None:
                assert all(sequence.request.deadline > now for sequence in batch)
                self.batches.append(batch)
                self._waiting.append(batch)

    def _end(self, batch: Batch, now: float) -> None:
        self._idle += 1
        self._queue.end_batch(batch, now)
        for request in [sequence.request for sequence in batch]:
            request.unfinished_sequences -= 1
            if not request.unfinished_sequences and self._queue.release(request):
                self.ended[request] = now


@pytest.fixture
def model(self_model: LoadedModel) -> LoadedModel:
    """A causal model, whose batches of unequal lengths run on its plain graph, padded to multiples of 8."""
    row, pair = self_model.operations(1, (1,))
    return costing(on_device(self_model), RunCost(CALL, ROW / row, PAIR / pair))


def requests_of(model: LoadedModel, *lengths: Iterable[int], caller: Caller = MODEST) -> list[Request]:
    """A request for each of some lists of lengths."""
    requests: list[Request] = [validated_of(model, [(rows, rows) for rows in each]) for each in lengths]
    for request in requests:
        request.caller = caller
    return requests


@pytest.mark.parametrize("sequences", [1, 16], ids=["of one sequence", "of several"])
@pytest.mark.parametrize(
    ("device", "expected"), [(DEVICE, [64]), (HOST, [32, 32])], ids=["on a device", "on two cores"]
)
def test_a_burst_is_one_batch_on_a_device_and_divided_among_cores(
    model: LoadedModel, device: Device, expected: list[int], sequences: int
) -> None:
    simulation = Simulation(device)
    burst = requests_of(model, *[[256] * sequences] * (64 // sequences))
    simulation.run((0.0, request) for request in burst)
    assert [len(batch) for batch in simulation.batches] == expected


def test_rows_of_a_batch_are_bounded_with_their_padding(model: LoadedModel) -> None:
    """Lengths are mixed, and one sequence is longer than the bound."""
    lengths = np.random.default_rng(0).integers(1, 513, size=600).tolist()
    parts = [[rows] for rows in lengths[:200]] + [lengths[at : at + 50] for at in range(200, 600, 50)]
    limits, longer = dataclasses.replace(LIMITS, max_batch_rows=4096), 5000
    simulation = Simulation(limits=limits)
    simulation.run((0.0, request) for request in requests_of(model, *parts, [longer]))
    assert len(simulation.ended) == len(parts) + 1
    assert sorted(own.lengths[0] for batch in simulation.batches for own in batch) == sorted(
        [*lengths, longer]
    )
    for batch in simulation.batches:
        longest = max(own.lengths[0] for own in batch)
        assert batch.rows == len(batch) * (longest if longest % 4 == 0 else -(-longest // 8) * 8)
        assert batch.rows <= limits.max_batch_rows or len(batch) == 1
    # Few rows are padding, and few batches are smaller than the bound allows.
    total = sum(lengths) + longer
    assert sum(batch.rows for batch in simulation.batches) < 1.1 * total
    assert len(simulation.batches) < 1.3 * total / limits.max_batch_rows


def test_callers_share_a_device(model: LoadedModel) -> None:
    """One caller has queued thousands of sequences when another sends the same work in small requests."""
    limits = dataclasses.replace(LIMITS, max_batch_rows=1024)
    simulation = Simulation(limits=limits)
    greedy = requests_of(model, *[[64] * 500] * 4, caller=GREEDY)
    modest = requests_of(model, *[[64]] * 400)
    simulation.run([*((0.0, request) for request in greedy), *((1e-3, request) for request in modest)])
    served = [[own.request.caller for own in batch] for batch in simulation.batches]
    last = max(at for at, callers in enumerate(served) if MODEST in callers)
    of_greedy = sum(callers.count(GREEDY) for callers in served[: last + 1])
    # Beside what ran before, of two batches.
    assert 400 - 16 <= of_greedy <= 400 + 4 * 16
    alone = Simulation(limits=limits)
    alone.run((1e-3, request) for request in requests_of(model, *[[64]] * 400))
    assert max(simulation.ended[request] for request in modest) < 2.2 * max(alone.ended.values())


def test_what_cannot_end_in_time_is_not_run(model: LoadedModel) -> None:
    """Of a burst that takes four runs, all but the last can end by the deadline."""
    limits = dataclasses.replace(LIMITS, max_batch_rows=1024)
    burst = requests_of(model, *[[64]] * 64)
    seconds = CALL + 1024 * ROW
    for request in burst:
        request.deadline = 3.5 * seconds
    simulation = Simulation(limits=limits)
    simulation.run((0.0, request) for request in burst)
    assert len(simulation.ended) + len(simulation.expired) == len(burst)
    assert not simulation.ended.keys() & set(simulation.expired)
    assert {len(batch) for batch in simulation.batches} == {16}
    assert math.isclose(max(simulation.ended.values()), len(simulation.batches) * seconds, rel_tol=0.1)
