"""The cost of runs: fitted to timed runs, for every graph of a loaded model."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attention_serving.artifact.manifest import OF_CONTEXTS, GraphKind
from attention_serving.server.engine.costs import Costs, RunCost
from attention_serving.server.engine.model import WHOLE_SCORE_BYTES_ON_DEVICE, LoadedModel
from attention_serving.server.engine.run import calibration
from attention_serving.server.engine.run.calibration import TIMED_SIZES, calibrate, fit, time_runs
from attention_serving.server.engine.run.provider import Provider
from attention_serving.server.engine.run.session import DEVICE_TURN
from attention_serving.server.engine.types import Array
from tests.server.seams import on_device, tapped

# Row and pair operations of the sizes that are timed, of a module 64 wide.
OPERATIONS = [(8192.0 * count * length, 256.0 * count * length**2) for count, length in TIMED_SIZES]
Timed = Sequence[tuple[tuple[float, float], float]]
operations = st.tuples(st.floats(0, 1e12), st.floats(0, 1e12))
timed = st.lists(st.tuples(operations, st.floats(1e-7, 100)), min_size=1, max_size=8)


@given(call=st.floats(1e-6, 1e-2), row=st.floats(1e-12, 1e-9), pair=st.floats(1e-12, 1e-9))
def test_coefficients_are_recovered_from_runs_without_noise(call: float, row: float, pair: float) -> None:
    known = RunCost(call, row, pair)
    found = RunCost(*fit(OPERATIONS, [known.seconds(*run) for run in OPERATIONS]))
    for run in OPERATIONS:
        assert found.seconds(*run) == pytest.approx(known.seconds(*run), rel=1e-6)
    assert found.fixed == pytest.approx(call, rel=1e-6)


@given(runs=timed)
@example(runs=[((1.0, 0.0), 3.0), ((2.0, 0.0), 2.0), ((3.0, 0.0), 1.0)])
@example(runs=[((0.0, 0.0), 0.125)] * 2)
@example(runs=[((2e-309 * count, 0.0), float(count)) for count in (1, 2, 3)])
def test_coefficients_are_finite_and_larger_runs_never_cost_less(runs: Timed) -> None:
    found = RunCost(*fit([run for run, _ in runs], [seconds for _, seconds in runs]))
    for term in (found.fixed, found.row, found.pair):
        assert term >= 0
        assert math.isfinite(term)
    for (row, pair), _ in runs:
        assert found.seconds(2 * row, 2 * pair) >= found.seconds(row, pair)


# What the runs take, two sizes one after the other, until memory lacks; and what each size is found to take.
RUNS: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "two runs of each size": ([6, 5, 5, 6, 1, 1], [5, 5]),
    "short runs more often": ([2, 1.8, 1.9, 3, 2.9], [1.8, 2.9]),
    "nothing": ([], []),
    "no larger size after a long run": ([51, 52, 1, 1], [51]),
    "no size beyond the memory": ([6, 6, 6], [6]),
}


@pytest.mark.parametrize(("durations", "expected"), RUNS.values(), ids=RUNS)
def test_the_fastest_run_counts(durations: Sequence[float], expected: Sequence[float]) -> None:
    milliseconds, remaining = [0.0], iter(durations)

    def run(*_size: int) -> None:
        duration = next(remaining, None)
        if duration is None:
            raise MemoryError
        milliseconds.append(milliseconds[-1] + duration)

    with nullcontext() if expected else pytest.raises(MemoryError):
        seconds = time_runs([(1, 1), (1, 16)], run, lambda: milliseconds[-1] / 1000).values()
        assert [1000 * size_seconds for size_seconds in seconds] == pytest.approx(expected)


class Turn(AbstractContextManager[None]):
    """A turn that takes a second to come."""

    def __init__(self) -> None:
        self.now = 0.0

    def __enter__(self) -> None:
        self.now += 1

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, *_size: int) -> None:
        self.now += 0.25


def test_the_wait_for_a_turn_is_not_timed() -> None:
    turn = Turn()
    assert time_runs([(1, 1)], turn.run, lambda: turn.now, turn) == {(1, 1): 0.25}


def test_a_clock_that_stands_still_is_not_believed() -> None:
    (seconds,) = time_runs([(1, 1)], lambda *_size: None, lambda: 1.0).values()
    assert seconds > 0


@pytest.mark.parametrize("longest", [20, 10_000])
@pytest.mark.parametrize("kind", [GraphKind.PLAIN, GraphKind.LENGTHS])
def test_each_graph_is_timed_at_the_sizes_that_its_cost_is_fitted_to_and_that_the_model_takes(
    cross_model: LoadedModel, kind: GraphKind, longest: int
) -> None:
    sizes = set(TIMED_SIZES)
    if kind is GraphKind.LENGTHS:  # which unequal lengths need
        sizes = {(max(count, 2), max(length, 2)) for count, length in TIMED_SIZES}
    max_lengths = {"query_length": longest, "key_length": longest + 10}
    manifest = cross_model.manifest.model_copy(update={"max_lengths": max_lengths})
    seen: set[tuple[int, int]] = set()

    def tap(inputs: dict[str, Array]) -> None:
        assert inputs["key"].shape[:2] == inputs["query"].shape[:2]
        seen.add(inputs["query"].shape[:2])

    sessions = {**cross_model.sessions, kind: tapped(cross_model, tap).sessions[kind]}
    model = calibrate(dataclasses.replace(cross_model, manifest=manifest, sessions=sessions, costs=Costs()))
    assert set(model.costs.run_costs) == set(model.sessions) - set(OF_CONTEXTS)
    assert min(model.costs.context_cost) >= 0 < sum(model.costs.context_cost)
    assert 0 < model.seconds(kind, 8, (16,) * len(model.axes)) < math.inf
    assert min(sizes) in seen
    if longest == 20:
        assert max(length for _, length in seen) == longest
    else:
        assert seen <= sizes | {(1, 1)}  # which the trimming of the arena runs


def test_a_device_has_sizes_of_its_own_and_is_timed_in_its_turn(
    cross_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sessions are those of the host. Sizes are those that are served, padding included."""
    monkeypatch.setattr(calibration, "TIMED_SIZES_ON_DEVICE", ((1, 1), (1, 24), (3, 16)))
    seen, model = defaultdict[GraphKind, set[tuple[int, int]]](set), on_device(cross_model)
    with ThreadPoolExecutor(1) as other_thread:

        def tap(kind: GraphKind, inputs: dict[str, Array]) -> None:
            seen[kind].add(inputs["key"].shape[:2])
            assert not other_thread.submit(DEVICE_TURN.acquire, blocking=False).result()

        kinds = (GraphKind.PLAIN, GraphKind.LENGTHS, GraphKind.MASK)
        taps = {kind: tapped(model, partial(tap, kind)).sessions[kind] for kind in kinds}
        sessions = {**model.sessions, **taps}
        timed = calibrate(dataclasses.replace(model, sessions=sessions, costs=Costs()))
    assert set(timed.costs.run_costs) == set(model.sessions) - set(OF_CONTEXTS)
    assert [seen[kind] for kind in kinds] == [
        {(1, 1), (1, 24), (3, 16)},
        {(2, 8), (2, 24), (3, 16)},
        {(1, 8), (1, 24), (3, 16)},
    ]


def test_without_a_list_of_operators_scores_are_expected(self_model: LoadedModel) -> None:
    """As earlier manifests, and graphs whose attention other operators compute."""
    graphs = {
        kind: graph.model_copy(update={"attention": ()}) for kind, graph in self_model.manifest.graphs.items()
    }
    manifest = self_model.manifest.model_copy(update={"graphs": graphs})
    model = dataclasses.replace(self_model, manifest=manifest, provider=Provider.CUDA.runtime.name)
    length = int((WHOLE_SCORE_BYTES_ON_DEVICE / (4 * 2)) ** 0.5)
    assert self_model.sequence_graph(GraphKind.PLAIN, (length,)) is GraphKind.BLOCKS
    assert model.sequence_graph(GraphKind.PLAIN, (length,)) is GraphKind.PLAIN
    assert model.sequence_graph(GraphKind.PLAIN, (2 * length,)) is GraphKind.BLOCKS
