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

    # Lengths differ only where there are several sequences; the first has a row less than the others.
    ragged = kind is GraphKind.LENGTHS
    taken = time_runs(
        [(max(count, 2), length + 1) if ragged else (count, length) for count, length in TIMED_SIZES], run
    )
    operations = [model.operations(count, length, length) for count, length in taken]
    return fit(operations, list(taken.values()))


def _item(model: LoadedModel, kind: GraphKind, length: int) -> Item:
    """A sequence of noise: zeros would be faster than what callers send."""
    rng = np.random.default_rng(length)
    inputs: dict[str, Array] = {}
    for spec in model.inputs:
        shape = [length, *(axis for axis in spec.axes[2:] if isinstance(axis, int))]
        noise = (
            rng.integers(spec.limit or length, size=shape) if spec.data_type == "int64" else rng.random(shape)
        )
        inputs[spec.name] = noise.astype(spec.data_type)
    mask = np.ones((1, length, length), np.bool_) if kind is GraphKind.MASK else None
    sizes = {axis: length for spec in model.inputs for axis in spec.axes[1:2] if isinstance(axis, str)}
    return Item(inputs, sizes, mask)
