"""What is expected of runs follows what they take: threads, deadlines, memory, and which runs count."""

import dataclasses
from typing import Any

import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.costs import FIRST_TRIAL, LAST_TRIAL, TRIAL_RUNS, Costs, Pace, RunCost
from attention_serving.server.engine.facts import PAIR_TENSORS
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import MASK_TENSORS, UNFUSED_TENSORS, LoadedModel
from attention_serving.server.engine.schedule.batch import Batch
from attention_serving.server.engine.schedule.queue import Queue
from tests.server.samples import HEADS, validated_of
from tests.server.seams import costing, on_device

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


UNMASKED, GROUPED = {"has_mask": False}, {"data_type": "float32", "num_key_heads": 1}


@pytest.mark.parametrize(
    ("kind", "changes", "keys", "expected"),
    [
        (GraphKind.LENGTHS, UNMASKED, 510, 0),
        (GraphKind.LENGTHS, {}, 512, MASK_TENSORS),
        (GraphKind.LENGTHS, {}, 510, UNFUSED_TENSORS * HEADS + MASK_TENSORS),
        (GraphKind.MASK, {}, 512, MASK_TENSORS * HEADS),
        (GraphKind.PLAIN, UNMASKED | GROUPED, 512, UNFUSED_TENSORS * HEADS),
        (GraphKind.WEIGHTS, {}, 512, PAIR_TENSORS[GraphKind.WEIGHTS] * HEADS),
        (GraphKind.LENGTHS, None, 512, PAIR_TENSORS[GraphKind.LENGTHS] * HEADS),
    ],
    ids=["flash", "efficient", "not aligned", "by head", "grouped fp32", "weights", "earlier manifest"],
)
def test_memory_on_a_device_is_that_of_its_kernels(
    cross_model: LoadedModel, kind: GraphKind, changes: Any, keys: int, expected: float
) -> None:
    model, sizes = on_device(cross_model), (7, keys)
    graph = model.manifest.graphs[kind]
    operators = [] if changes is None else [graph.attention[0].model_copy(update=changes)]
    graphs = {**model.manifest.graphs, kind: graph.model_copy(update={"attention": operators})}
    model = dataclasses.replace(model, manifest=model.manifest.model_copy(update={"graphs": graphs}))
    assert model.pair_elements(kind, sizes) == expected * 7 * keys
    on_host = dataclasses.replace(model, provider=cross_model.provider)
    assert on_host.pair_elements(kind, sizes) == PAIR_TENSORS[kind] * HEADS * 7 * keys


def test_long_sequences_stay_whole_on_a_device_if_their_kernels_hold_no_scores(
    cross_model: LoadedModel,
) -> None:
    model, rows = on_device(cross_model), 40_000
    kinds = [model.sequence_graph(kind, (rows, rows - 1)) for kind in (GraphKind.PLAIN, GraphKind.MASK)]
    assert kinds == [GraphKind.PLAIN, GraphKind.MASK_BLOCKS]


def test_what_is_expected_of_a_padded_sequence_is_that_of_its_run(cross_model: LoadedModel) -> None:
    model, kind = costing(on_device(cross_model), RunCost(1.0, 1e-6, 1e-6)), GraphKind.MASK
    plan = model.plan(kind, (5, 6))
    assert (plan.lengths, plan.rows, plan.computed_rows) == ((5, 6), 11, 13)
    assert (plan.seconds, plan.run_bytes) == (
        model.seconds(kind, 1, (5, 8)),
        model.run_bytes(kind, 1, (5, 8)),
    )
    assert plan.result_bytes == cross_model.plan(kind, (5, 6)).result_bytes


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
