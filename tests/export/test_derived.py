"""Formulas of derived axes: those that fit hold for all lengths, and where none fits, none is found."""

from collections.abc import Callable

import pytest

from attention_serving.export.derived import derive_axis

MOST = 8192
# By name, the smallest length and the size by length.
SIZES: dict[str, tuple[int, Callable[[int], int]]] = {
    "a class token": (1, lambda rows: rows + 1),
    "a convolution without padding": (3, lambda rows: rows - 2),
    "pairs, without the last": (2, lambda rows: rows // 2),
    "stride 2, padded": (1, lambda rows: (rows - 1) // 2 + 1),
    "two strides": (7, lambda rows: ((rows - 3) // 2 + 1 - 3) // 2 + 1),
    "patches of 16 and a token": (1, lambda rows: (rows + 15) // 16 + 1),
    "padded to a multiple": (1, lambda rows: (rows + 7) // 8 * 8),
    "upsampled": (1, lambda rows: 4 * rows + 3),
    "three for two": (1, lambda rows: (3 * rows + 1) // 2),
    "frames of a waveform": (400, lambda rows: (rows - 400) // 320 + 1),
}
NONE: dict[str, Callable[[int], int]] = {
    "a window": lambda rows: min(rows, 300),
    "pairs of rows": lambda rows: rows**2,
    "an exception": lambda rows: rows // 2 + (rows == 255),
}


@pytest.mark.parametrize(("least", "size"), SIZES.values(), ids=SIZES)
def test_a_formula_holds_for_every_length(least: int, size: Callable[[int], int]) -> None:
    formula = derive_axis("sequence", size, range(least, MOST + 1))
    assert formula is not None
    assert all(formula.size(rows) == size(rows) for rows in range(least, MOST + 1))


@pytest.mark.parametrize("size", [lambda rows: rows // 4, lambda rows: rows // 8 * 3 + 1], ids=["4", "8"])
@pytest.mark.parametrize("step", [4, 16])
def test_a_formula_holds_for_every_multiple(size: Callable[[int], int], step: int) -> None:
    lengths = range(step, MOST + 1, step)
    formula = derive_axis("sequence", size, lengths)
    assert formula is not None
    assert all(formula.size(rows) == size(rows) for rows in lengths)


@pytest.mark.parametrize("size", NONE.values(), ids=NONE)
def test_other_sizes_have_none(size: Callable[[int], int]) -> None:
    assert derive_axis("sequence", size, range(1, MOST + 1)) is None
