"""What is expected of runs follows what they take: the choice of threads, deadlines, and what counts."""

import dataclasses

import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.costs import FIRST_TRIAL, LAST_TRIAL, TRIAL_RUNS, Costs, Pace, RunCost
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.schedule.batch import Batch
from attention_serving.server.engine.schedule.queue import Queue
from tests.server.samples import validated_of

# Seconds that a run is expected to take on one thread, and what it takes on one and on all: on a machine that
# does nothing else, and on one whose cores are busy.
EXPECTED = 0.002
QUIET, BUSY = (0.0021, 0.0012), (0.0039, 0.0079)
# Of the runs, those that try the other way.
TRIALS = 1.1 * TRIAL_RUNS / LAST_TRIAL


class Server:
    """A queue whose runs take what a test says.

    Attributes:
        queue: The queue.
    """

    def __init__(self, model: LoadedModel) -> None:
        paces = {GraphKind.PLAIN: Pace(has_all_threads=True)}
        costs = Costs(dict.fromkeys(GraphKind, RunCost(EXPECTED, 0, 0)), paces=paces)
        self._model = dataclasses.replace(model, costs=costs)
        self.queue = Queue(Limits(), 2)

    def arrive(self, deadline: float = float("inf")) -> Batch | None:
        """The batch of a request that arrives; None if it expires."""
        self.queue.add(validated_of(self._model, [(2, 2)], deadline=deadline), 0.0)
        return self.queue.next(0.0)[0]

    def take(self) -> Batch:
        """The batch of a request without a deadline."""
        batch = self.arrive()
        assert batch is not None
        return batch

    def run(self, seconds: tuple[float, float]) -> Batch:
        """Answers a request, alone."""
        batch = self.take()
        batch.run_seconds = seconds[batch.is_parallel]
        self.queue.end_batch(batch, 0.0)
        return batch

    def choices(self, seconds: tuple[float, float], count: int) -> list[bool]:
        """Whether each of some runs had all threads."""
        return [self.run(seconds).is_parallel for _ in range(count)]


def test_a_server_that_starts_on_a_busy_machine_recovers_when_it_is_quiet(self_model: LoadedModel) -> None:
    server = Server(self_model)
    assert sum(server.choices(BUSY, 2 * LAST_TRIAL)) < 0.05 * 2 * LAST_TRIAL
    recovering = server.choices(QUIET, LAST_TRIAL)
    assert all(recovering[recovering.index(True) + TRIAL_RUNS :][: FIRST_TRIAL - TRIAL_RUNS - 1])
    server.choices(QUIET, LAST_TRIAL)
    assert sum(server.choices(QUIET, 4 * LAST_TRIAL)) >= (1 - TRIALS) * 4 * LAST_TRIAL
    batch = server.run(QUIET)
    assert batch.seconds == pytest.approx(QUIET[batch.is_parallel])


def test_a_server_gives_way_when_the_machine_becomes_busy_and_no_longer(self_model: LoadedModel) -> None:
    server = Server(self_model)
    assert sum(server.choices(QUIET, FIRST_TRIAL + TRIAL_RUNS)) == FIRST_TRIAL
    server.run((0.2, 0.2))  # one disturbed run decides nothing
    assert server.run(QUIET).is_parallel
    assert sum(server.choices(BUSY, LAST_TRIAL)) < 0.1 * LAST_TRIAL
    assert sum(server.choices(QUIET, 2 * LAST_TRIAL)[LAST_TRIAL:]) > 0.9 * LAST_TRIAL


def test_only_runs_that_were_alone_and_did_not_fail_count(self_model: LoadedModel) -> None:
    server = Server(self_model)
    first, second = server.take(), server.take()
    first.run_seconds = second.run_seconds = 9.0
    server.queue.end_batch(first, 0.0)  # beside the second
    server.queue.end_batch(second, 0.0)  # began beside the first
    server.queue.end_batch(server.take(), 0.0)  # failed
    assert server.run(QUIET).seconds == pytest.approx(EXPECTED)


def test_a_deadline_is_compared_with_what_runs_take_now(self_model: LoadedModel) -> None:
    server = Server(self_model)
    server.run(BUSY)
    assert server.arrive(deadline=EXPECTED / 2) is None
    server.run((EXPECTED / 4, EXPECTED))
    assert server.arrive(deadline=EXPECTED / 2)


def test_sizes_have_paces_of_their_own() -> None:
    """Small runs are slower on all threads, and large ones faster."""
    pace, sizes = Pace(has_all_threads=True), {1e-4: 3.0, 1e-2: 0.5}
    for expected, ratio in sizes.items():
        assert pace.choose(expected, is_alone=True) == (True, expected)
        pace.observe(expected, ratio * expected, parallel=True)
    assert [pace.choose(expected, is_alone=True)[0] for expected in sizes] == [False, True]
    assert not pace.choose(1e-2, is_alone=False)[0]
    pace.observe(1e-2, 2e-2, parallel=True)
    assert pace.least_seconds(1e-2) == pytest.approx(0.55e-2)
    assert not Pace(has_all_threads=False).choose(1.0, is_alone=True)[0]
