"""Calibration: every graph of a loaded model gets a measured cost."""

import dataclasses
import math
import time

import pytest

from attention_serving.artifact.manifest import ATTENTION_GRAPHS, GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.calibration import calibrated
from attention_serving.server.engine.run.cost import TIMED_SIZES
from attention_serving.server.engine.schedule.queue import Queue
from attention_serving.server.engine.types import Array
from tests.server.samples import CROSS, SELF, TEXT, validated_of
from tests.server.seams import tapped


@pytest.mark.parametrize("name", [SELF, CROSS, TEXT])
def test_every_graph_gets_a_finite_positive_cost(models: dict[str, LoadedModel], name: str) -> None:
    untimed = dataclasses.replace(models[name], costs={})
    model = calibrated(untimed)
    assert set(model.costs) == set(untimed.sessions)
    for kind in model.costs:
        for count, length in TIMED_SIZES:
            seconds = model.seconds(kind, count, length, length)
            assert 0 < seconds < math.inf


def test_a_repository_calibrates_its_models(self_model: LoadedModel) -> None:
    assert set(self_model.costs) == set(self_model.sessions)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (GraphKind.PLAIN, set(TIMED_SIZES)),
        (GraphKind.LENGTHS, {(max(count, 2), length + 1) for count, length in TIMED_SIZES}),
    ],
    ids=["plain", "lengths"],
)
def test_each_graph_is_timed_at_the_sizes_that_its_cost_is_fitted_to(
    cross_model: LoadedModel, kind: GraphKind, expected: set[tuple[int, int]]
) -> None:
    seen: set[tuple[int, int]] = set()

    def tap(inputs: dict[str, Array]) -> None:
        count, length, _ = inputs["query"].shape
        seen.add((count, length))

    sessions = {**cross_model.sessions, kind: tapped(cross_model, tap).sessions[kind]}
    calibrated(dataclasses.replace(cross_model, sessions=sessions))
    assert seen <= expected | {(1, 1)}  # which the trimming of the arena runs
    assert min(expected) in seen


@pytest.mark.parametrize("kind", ATTENTION_GRAPHS)
def test_no_sequence_is_longer_than_the_model_takes(cross_model: LoadedModel, kind: GraphKind) -> None:
    max_lengths = {"query_length": 20, "key_length": 30}
    manifest = cross_model.manifest.model_copy(update={"max_lengths": max_lengths})
    seen: set[int] = set()

    def tap(inputs: dict[str, Array]) -> None:
        seen.update((inputs["query"].shape[1], inputs["key"].shape[1]))

    sessions = {**cross_model.sessions, kind: tapped(cross_model, tap).sessions[kind]}
    calibrated(dataclasses.replace(cross_model, manifest=manifest, sessions=sessions))
    assert max(seen) == 20


def test_a_calibrated_model_is_the_same_otherwise(self_model: LoadedModel) -> None:
    model = calibrated(self_model)
    assert model.manifest is self_model.manifest
    assert model.sessions is self_model.sessions


def test_time_in_which_a_run_does_not_compute_does_not_count(self_model: LoadedModel) -> None:
    def sleep(_: dict[str, Array]) -> None:
        time.sleep(0.005)

    sessions = {GraphKind.PLAIN: tapped(self_model, sleep).sessions[GraphKind.PLAIN]}
    model = calibrated(dataclasses.replace(self_model, sessions=sessions))
    assert model.seconds(GraphKind.PLAIN, 1, 1, 1) < 0.0025


class BusyMachine:
    """Clocks of a machine whose cores others have half of the time, and runs that let them go on.

    A run on one thread computes for 100 microseconds a row; all threads take a share of that.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._cpu = self._wall = 0.0

    def thread_time(self) -> float:
        return self._cpu

    def perf_counter(self) -> float:
        return self._wall

    def run(self, inputs: dict[str, Array]) -> None:
        self._compute(inputs, 1.0)

    def run_parallel(self, inputs: dict[str, Array]) -> None:
        self._compute(inputs, self._share)

    def _compute(self, inputs: dict[str, Array], share: float) -> None:
        count, length, _ = inputs["query"].shape
        seconds = share * 1e-4 * count * length
        self._cpu += seconds
        self._wall += 2 * seconds


@pytest.mark.parametrize("share", [0.6, 1.5], ids=["faster", "slower"])
@pytest.mark.parametrize("length", [1, 128])
def test_a_run_that_is_alone_takes_what_is_faster_also_on_a_busy_machine(
    self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch, share: float, length: int
) -> None:
    machine = BusyMachine(share)
    monkeypatch.setattr(time, "thread_time", machine.thread_time)
    monkeypatch.setattr(time, "perf_counter", machine.perf_counter)
    model = calibrated(
        dataclasses.replace(
            tapped(self_model, machine.run),
            parallel_sessions=tapped(self_model, machine.run_parallel).sessions,
        )
    )
    alone = model.seconds(GraphKind.PLAIN, 1, length, length)
    assert alone == pytest.approx(1e-4 * length)
    assert model.parallel_seconds(GraphKind.PLAIN, 1, length, length) == pytest.approx(share * alone)
    dispatch = Queue(Limits(), slots=2)
    dispatch.add(validated_of(model, [(length, length)]), 0.0, inline=False)
    batch, _ = dispatch.next(0.0)
    assert batch is not None
    assert batch.is_parallel == (share < 1)
