"""How the size of an axis of an output follows from the length of a sequence: a formula that fits runs."""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice, pairwise

import numpy as np

from attention_serving.artifact.manifest import DerivedAxis

# Rows above the smallest length that a module takes: any small stride, and longer lengths of both parities.
SHORT, LONG = range(10), (13, 29, 62, 125, 254, 511, 1021, 2042)
# Numbers of the formulas that are tried. Upsampling by 3 and downsampling by 2 have scale 3 and stride 2.
MOST_STRIDE, MOST_SCALE = 1024, 8
# A formula is tried where its size changes next, until it holds there. Its numbers are few.
MOST_ROUNDS = 16


def derive_axis(axis: str, size_at: Callable[[int], int | None], lengths: range) -> DerivedAxis | None:
    """The simplest formula that holds for all lengths that are tried.

    Args:
        axis: The sequence axis.
        size_at: The size of the axis of the output for a length; None if the module does not take it.
        lengths: All lengths that requests may have.
    """
    sizes, step = dict[int, int](), lengths.step

    def run(*tries: int) -> None:
        for length in tries:
            if length not in sizes and length in lengths and (size := size_at(length)) is not None:
                sizes[length] = size

    run(*(lengths.start + step * rows for rows in (*SHORT, *(rows // step for rows in LONG))))
    for change in list(_changes(sizes))[:2]:  # of a large stride: where exactly
        low, high = change
        while high - low > step:
            middle = low + (high - low) // step // 2 * step
            run(middle)
            if middle not in sizes:
                break
            low, high = (middle, high) if sizes[middle] == sizes[low] else (low, middle)
    for _ in range(MOST_ROUNDS):
        formula = _fit(axis, sizes)
        if formula is None:
            return None
        run(*_around_changes(formula, range(min(sizes), max(sizes), step)))
        if all(formula.size(length) == size for length, size in sizes.items()):
            return formula
    return None


def _changes(sizes: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Each two neighbouring lengths between which the size changes."""
    return ((low, high) for low, high in pairwise(sorted(sizes)) if sizes[low] != sizes[high])


def _around_changes(formula: DerivedAxis, lengths: range) -> list[int]:
    """The lengths before and after the first and the last changes of the size."""
    around, step = list[int](), lengths.step
    for direction in (lengths, reversed(lengths)):
        changes = (length for length in direction if formula.size(length) != formula.size(length + step))
        around += [length + at for length in islice(changes, 3) for at in (0, step)]
    return around


def _fit(axis: str, sizes: Mapping[int, int]) -> DerivedAxis | None:
    """The formula of the smallest stride, and then scale, that fits sizes by length."""
    lengths, values = np.array(sorted(sizes)), np.array([sizes[length] for length in sorted(sizes)])
    rise = int(values[-1] - values[0])
    for stride in range(1, MOST_STRIDE + 1):
        shifts = np.arange(stride)[:, None]
        for scale in range(1, 1 + (MOST_SCALE if stride > 1 else 1)):
            steps = (scale * lengths + shifts) // stride  # (shifts, lengths)
            repeats = rise // np.maximum(steps[:, -1] - steps[:, 0], 1)
            extras = values[0] - repeats * steps[:, 0]
            fits = (repeats[:, None] * steps + extras[:, None] == values).all(axis=1) & (repeats >= 1)
            if fits.any():
                shift = int(fits.argmax())
                repeat, extra = int(repeats[shift]), int(extras[shift])
                return DerivedAxis(
                    axis=axis, scale=scale, shift=shift, stride=stride, repeat=repeat, extra=extra
                )
    return None
