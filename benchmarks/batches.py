"""Groups sequences as compute in process runs them: alone, or padded to the longest of a batch."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import Array, Lengths, Model, Sequence, sequences

ONE_BY_ONE = "one by one"
PADDED = "padded batches"


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs of one run.

    Attributes:
        inputs: By name, each (B, T, d), zeros after the end of a shorter sequence.
        key_lengths: (B,) where the sequences differ in length; None where nothing is padded.
    """

    inputs: dict[str, Array]
    key_lengths: NDArray[np.int64] | None
    tokens: int

    @property
    def sequences(self) -> int:
        """B."""
        return len(next(iter(self.inputs.values())))


def ways(model: Model, lengths: Lengths, size: int) -> dict[str, list[Batch]]:
    """Every way to run a workload of which `size` sequences are there at a time."""
    pool = sequences(model, lengths)
    found = {ONE_BY_ONE: [pad(model, [one]) for one in pool]}
    if size > 1:
        full = pool * -(-size // len(pool))  # a small pool repeats to fill one batch
        groups = [full[at : at + size] for at in range(0, len(full), size)]
        found[PADDED] = [pad(model, group) for group in groups]
    return found


def pad(model: Model, group: Many[Sequence]) -> Batch:
    """Makes one batch of some sequences."""
    columns = [list(column) for column in zip(*group, strict=True)]
    uneven = any(len({len(array) for array in column}) > 1 for column in columns)
    key_lengths = np.array([len(array) for array in columns[-1]], np.int64)
    return Batch(
        inputs={name: _stack(column) for name, column in zip(model.inputs, columns, strict=True)},
        key_lengths=key_lengths if uneven else None,
        tokens=sum(len(array) for array in columns[0]),
    )


def _stack(arrays: list[Array]) -> Array:
    """(T_i, d) each to (B, T, d)."""
    stacked = np.zeros((len(arrays), max(map(len, arrays)), arrays[0].shape[1]), np.float32)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked
