"""Times a loaded model, so that the scheduler knows what runs cost on this machine."""

import dataclasses
import math

import numpy as np

from artifact.manifest import IN_BLOCKS, GraphKind
from server.engine.cost import TIMED_BLOCK_SIZES, TIMED_SIZES, RunCost, fit, time_runs
from server.engine.execute import run_batch
from server.engine.model import LoadedModel
from server.engine.types import Array, SequenceInputs


def calibrated(model: LoadedModel) -> LoadedModel:
    """The same model with the measured cost of each of its graphs."""
    return dataclasses.replace(model, costs={graph: _measure(model, graph) for graph in model.sessions})


def _measure(model: LoadedModel, graph: GraphKind) -> RunCost:
    # Batches of the lengths graph have unequal lengths: the first sequence is one row shorter.
    ragged = graph is GraphKind.LENGTHS

    def run(count: int, length: int) -> None:
        lengths = [length - (ragged and index == 0) for index in range(count)]
        run_batch(model, graph, [_random_sequence(model, graph, length) for length in lengths])

    longest = min(model.manifest.max_lengths.values(), default=math.inf)
    timed = TIMED_BLOCK_SIZES if graph in IN_BLOCKS.values() else TIMED_SIZES
    sizes = [
        (max(count, 2) if ragged else count, int(min(length + ragged, longest))) for count, length in timed
    ]
    seconds = time_runs(sizes, run)
    operations = [model.operations(count, length, length) for count, length in seconds]
    return fit(operations, list(seconds.values()))


def _random_sequence(model: LoadedModel, graph: GraphKind, length: int) -> SequenceInputs:
    """A sequence of noise, because zeros are faster than what callers send."""
    rng = np.random.default_rng(length)
    inputs: dict[str, Array] = {}
    for spec in model.inputs:
        shape = [length, *(axis for axis in spec.axes[2:] if isinstance(axis, int))]
        bound = spec.exclusive_upper_bound or length
        noise = rng.integers(bound, size=shape) if spec.data_type == "int64" else rng.random(shape)
        inputs[spec.name] = noise.astype(spec.data_type)
    masked = graph in (GraphKind.MASK, GraphKind.MASK_BLOCKS)
    mask = np.ones((1, length, length), np.bool_) if masked else None
    sizes = {axis: length for spec in model.inputs for axis in spec.axes[1:2] if isinstance(axis, str)}
    return SequenceInputs(inputs, sizes, mask, graph)
