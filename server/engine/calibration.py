"""Times a loaded model, so that the scheduler can decide by what runs cost on this machine."""

import dataclasses

import numpy as np

from artifact.manifest import GraphKind
from server.engine.cost import TIMED_SIZES, RunCost, fit, time_runs
from server.engine.execute import run_batch
from server.engine.model import LoadedModel
from server.engine.types import Array, Item


def calibrated(model: LoadedModel) -> LoadedModel:
    """The same model with the measured cost of each of its graphs."""
    return dataclasses.replace(model, costs={kind: _measure(model, kind) for kind in model.sessions})


def _measure(model: LoadedModel, kind: GraphKind) -> RunCost:
    def run(count: int, length: int) -> None:
        items = [_item(model, kind, length - (kind is GraphKind.LENGTHS and at == 0)) for at in range(count)]
        run_batch(model, items, return_weights=kind is GraphKind.WEIGHTS)

    # Lengths differ only if there are several sequences; the first has one row fewer than the others.
    ragged = kind is GraphKind.LENGTHS
    longest = min(model.manifest.max_lengths.values(), default=None)
    taken = time_runs(
        [
            (max(count, 2), _bounded(length + 1, longest)) if ragged else (count, _bounded(length, longest))
            for count, length in TIMED_SIZES
        ],
        run,
    )
    operations = [model.operations(count, length, length) for count, length in taken]
    return fit(operations, list(taken.values()))


def _bounded(length: int, longest: int | None) -> int:
    """A length to time that the model takes."""
    return length if longest is None else min(length, longest)


def _item(model: LoadedModel, kind: GraphKind, length: int) -> Item:
    """A sequence of noise: zeros would be faster than what callers send."""
    rng = np.random.default_rng(length)
    inputs: dict[str, Array] = {}
    for spec in model.inputs:
        shape = [length, *(axis for axis in spec.axes[2:] if isinstance(axis, int))]
        bound = spec.exclusive_upper_bound or length
        noise = rng.integers(bound, size=shape) if spec.data_type == "int64" else rng.random(shape)
        inputs[spec.name] = noise.astype(spec.data_type)
    mask = np.ones((1, length, length), np.bool_) if kind is GraphKind.MASK else None
    sizes = {axis: length for spec in model.inputs for axis in spec.axes[1:2] if isinstance(axis, str)}
    return Item(inputs, sizes, mask)
