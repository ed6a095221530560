"""What a model has done: requests by how they ended, and runs by their size."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

from attention_serving.server.engine.errors import DeadlineExceededError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.statistics import (
    MOST_WAITING,
    BatchReport,
    Durations,
    ModelStatistics,
    RunDurations,
    RunTimes,
)
from tests.server.seams import Held, withdraw

THREADS = 4


def test_requests_runs_and_failures_are_counted(self_model: LoadedModel) -> None:
    started = time.time()
    with Held(dataclasses.replace(self_model, statistics=ModelStatistics()), max_batch_sequences=3) as held:
        held.submit([(2, 2)] * 4)
        withdraw(held.engine, held.submit([(2, 2)]))
        late = held.submit([(2, 2)], deadline=time.monotonic())
    found = held.model.statistics
    assert isinstance(late.outcome, DeadlineExceededError)
    assert (found.succeeded.count, found.failed.count, found.queued.count) == (2, 2, 5)
    assert {size: runs.count for size, runs in found.runs.items()} == {3: 1, 1: 2}
    computed = sum(runs.compute for runs in found.runs.values())
    assert 0 < computed <= found.succeeded.seconds
    assert found.failed.seconds > 0
    assert started <= found.last_run <= time.time()


def test_what_waits_to_be_counted_is_bounded_and_nothing_is_lost() -> None:
    found = ModelStatistics()

    def add(size: int) -> None:
        for _ in range(MOST_WAITING):
            found.add_run(BatchReport("m", 0, 0, [0.5] * size, RunTimes(1.0, 2.0, 3.0), [0.25] * size))
            found.add_failure(4.0)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(add, range(1, THREADS + 1)))
    total = MOST_WAITING * sum(range(1, THREADS + 1))
    assert total - found.succeeded.count <= (MOST_WAITING + THREADS) * THREADS
    assert found.succeeded == Durations(total, 0.25 * total)
    assert found.queued == Durations(total, 0.5 * total)
    assert found.failed == Durations(THREADS * MOST_WAITING, 4.0 * THREADS * MOST_WAITING)
    parts = RunDurations(MOST_WAITING, *(seconds * MOST_WAITING for seconds in (1.0, 2.0, 3.0)))
    assert found.runs == dict.fromkeys(range(1, THREADS + 1), parts)
