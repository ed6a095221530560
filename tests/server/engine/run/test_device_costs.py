"""The cost model and the scheduler on a device: batching wins there, and they find out by themselves."""

import dataclasses

import numpy as np
import pytest

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import PAIR_TENSORS, WHOLE_SCORE_BYTES_ON_DEVICE, LoadedModel
from attention_serving.server.engine.run.calibration import calibrated
from attention_serving.server.engine.run.cost import TIMED_SIZES_ON_DEVICE, RunCost, fit, time_runs
from attention_serving.server.engine.run.provider import Provider
from attention_serving.server.engine.schedule.queue import Queue
from attention_serving.server.engine.types import Array
from tests.server.samples import validated_of
from tests.server.seams import costing, deliver, tapped

# Durations of runs on a device are SYNTHETIC: no device was measured. They follow from round figures for a
# large GPU over PCI Express: 110 microseconds to launch the kernels of a run, copies at 25 GB/s in both
# directions, 40 TFLOP/s in fp32 once a run has many hundred rows, and up to 8 % of noise.
LAUNCH_SECONDS = 110e-6
BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 25e9, 40e12
# Below this, the device is not filled.
ROWS_OF_HALF_THE_RATE = 200
NOISE = 0.08
WIDTHS = [64, 768]
# What a run on one core of a CPU costs at width 768, as measured: seconds for call, row and pair of rows.
CPU_CALL, CPU_ROW, CPU_PAIR = 6e-5, 45e-6, 1e-7
LARGE = Limits(max_batch_sequences=256)


def seconds(width: int, count: int, length: int) -> float:
    """How long self-attention of that width takes for `count` sequences, without noise."""
    rows = count * length
    operations = 8 * width * width * rows + 4 * width * rows * length
    copies = 2 * 4 * width * rows / BYTES_PER_SECOND
    return LAUNCH_SECONDS + copies + operations / OPERATIONS_PER_SECOND * (1 + ROWS_OF_HALF_THE_RATE / rows)


def timed(width: int) -> dict[tuple[int, int], float]:
    """By number and length of sequences, what calibration would measure."""
    noise = np.random.default_rng(width).uniform(1, 1 + NOISE, len(TIMED_SIZES_ON_DEVICE))
    return {
        size: seconds(width, *size) * float(factor)
        for size, factor in zip(TIMED_SIZES_ON_DEVICE, noise, strict=True)
    }


def fitted(model: LoadedModel, width: int) -> RunCost:
    """The cost of a module of that width, in the operations of the tests' small model."""
    found = timed(width)
    return fit([model.operations(count, length, length) for count, length in found], list(found.values()))


def on_cpu(model: LoadedModel) -> RunCost:
    row, pair = model.operations(1, 1, 0)[0], model.operations(1, 1, 1)[1]
    return RunCost(CPU_CALL, CPU_ROW / row, CPU_PAIR / pair)


@pytest.mark.parametrize("width", WIDTHS)
def test_predictions_are_close_to_what_was_timed(self_model: LoadedModel, width: int) -> None:
    cost = fitted(self_model, width)
    for size in [*TIMED_SIZES_ON_DEVICE, (256, 128), (128, 6), (16, 1024)]:
        predicted = cost.seconds(*self_model.operations(size[0], size[1], size[1]))
        assert predicted == pytest.approx(seconds(width, *size), rel=0.25)
    assert cost.call == pytest.approx(LAUNCH_SECONDS, rel=0.35)


def runs(model: LoadedModel, lengths: list[int]) -> list[int]:
    """Sequences of each run, if so many requests of one sequence are queued at once."""
    queue = Queue(LARGE, slots=1)
    for length in lengths:
        queue.add(validated_of(model, [(length, length)]), 0.0, inline=False)
    found = []
    while (batch := queue.next(0.0)[0]) is not None:
        found.append(len(batch))
        for queued in batch:
            assert deliver(queued, {})
            assert queue.release(queued.request)
        queue.ended(batch, 0.0)
    assert sum(found) == len(lengths)
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("length", [6, 64, 128])
def test_requests_of_one_length_run_together_at_every_width(
    self_model: LoadedModel, width: int, length: int
) -> None:
    model = costing(self_model, fitted(self_model, width))
    assert max(runs(model, [length] * 32)) >= 16


@pytest.mark.parametrize("width", WIDTHS)
def test_mixed_lengths_run_together_on_a_device_and_alone_on_a_cpu(
    self_model: LoadedModel, width: int
) -> None:
    lengths = np.random.default_rng(0).integers(1, 129, 64).tolist()
    device = runs(costing(self_model, fitted(self_model, width)), lengths)
    host = runs(costing(self_model, on_cpu(self_model)), lengths)
    assert len(device) <= 8
    assert len(host) >= 24


@pytest.fixture
def on_device(self_model: LoadedModel) -> LoadedModel:
    """The model as it would be on a device, though the sessions are those of the host."""
    return dataclasses.replace(self_model, provider=Provider.CUDA.runtime.name, costs={}, pair_tensors={})


def test_calibration_on_a_device_times_large_batches(on_device: LoadedModel) -> None:
    seen: set[tuple[int, int]] = set()

    def tap(inputs: dict[str, Array]) -> None:
        seen.add(inputs["query"].shape[:2])

    model = calibrated(tapped(on_device, tap))
    assert set(model.costs) == set(model.sessions)
    assert (8, 512) in seen or (32, 64) in seen
    # The memory of this process is not that of the device.
    assert model.pair_tensors == {kind: PAIR_TENSORS[kind] for kind in model.sessions}


def test_sizes_beyond_the_memory_of_the_device_are_not_timed() -> None:
    ran: list[tuple[int, int]] = []

    def run(count: int, length: int) -> None:
        if count * length > 512:
            raise MemoryError
        ran.append((count, length))

    found = time_runs(TIMED_SIZES_ON_DEVICE, run)
    assert set(found) == set(ran) == {(1, 1), (1, 64), (8, 16), (1, 512), (8, 64)}
    with pytest.raises(MemoryError):
        time_runs([(64, 64)], run)


def test_longer_sequences_run_whole_on_a_device(self_model: LoadedModel, on_device: LoadedModel) -> None:
    length = int((WHOLE_SCORE_BYTES_ON_DEVICE / (4 * 2)) ** 0.5)
    assert self_model.sequence_graph(GraphKind.PLAIN, length, length) is GraphKind.BLOCKS
    assert on_device.sequence_graph(GraphKind.PLAIN, length, length) is GraphKind.PLAIN
    assert on_device.sequence_graph(GraphKind.PLAIN, 2 * length, length) is GraphKind.BLOCKS
