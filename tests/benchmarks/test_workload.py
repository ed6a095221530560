import numpy as np
import pytest

from benchmarks.compute import pad
from benchmarks.load import poisson
from benchmarks.workload import FULL, AttentionKind, Lengths, Model, sequences

MIXED = Lengths(512, mixed=True)


def test_mixed_lengths_are_lognormal_and_reproducible() -> None:
    lengths = MIXED.draw(64)

    assert lengths == MIXED.draw(64)
    assert lengths != sorted(lengths)
    assert min(lengths) == 1
    assert 400 < max(lengths) <= 512
    assert 45 < np.mean(lengths) < 60
    assert np.isclose(np.median(lengths), 512 / 20, atol=2)


def test_a_single_length_is_repeated() -> None:
    assert Lengths(6).draw(3) == [6, 6, 6]


@pytest.mark.parametrize("kind", AttentionKind)
def test_sequences_have_the_lengths_drawn(kind: AttentionKind) -> None:
    found = sequences(Model(kind, 64, 4), MIXED)

    lengths = MIXED.draw(64)
    assert [len(one[0]) for one in found] == lengths
    if kind is AttentionKind.CROSS:
        assert [len(one[1]) for one in found] == [*lengths[1:], lengths[0]]
    assert all(array.dtype == np.float32 and array.shape[1] == 64 for one in found for array in one)


def test_padding_is_zero_and_key_lengths_are_those_of_the_keys() -> None:
    model = Model(AttentionKind.CROSS, 64, 4)
    group = sequences(model, MIXED)[:8]
    batch = pad(model, group)

    assert batch.key_lengths is not None
    assert (batch.sequences, batch.tokens) == (8, sum(len(query) for query, _ in group))
    for row, (_, key), length in zip(batch.inputs["key"], group, batch.key_lengths, strict=True):
        assert np.array_equal(row[:length], key)
        assert not row[length:].any()


def test_arrivals_are_a_reproducible_poisson_process() -> None:
    due = poisson(1000, 20, seed=3)

    assert np.array_equal(due, poisson(1000, 20, seed=3))
    assert not np.array_equal(due, poisson(1000, 20, seed=4))
    assert len(due) == 20_000
    assert np.all(np.diff(due) >= 0)
    assert 0 <= due[0] <= due[-1] < 20e9
    gaps = np.diff(due) / 1e9
    # Exponential gaps have a standard deviation equal to their mean.
    assert np.isclose(gaps.mean(), 1e-3, rtol=0.01)
    assert np.isclose(gaps.std(), 1e-3, rtol=0.05)


@pytest.mark.parametrize(("rate", "seconds"), [(0, 1), (1, 0), (-1, 1)])
def test_arrivals_refuse_a_rate_or_duration_that_is_not_positive(rate: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        poisson(rate, seconds, seed=0)


def test_the_full_grid_covers_all_kinds_widths_lengths_and_loads() -> None:
    cells = [cell for model in FULL.models for cell in FULL.cells(model)]

    assert len(cells) == len({cell.name for cell in cells}) == 2 * 3 * 4 * 3 + len(FULL.extra)
    assert {cell.model.kind for cell in cells} == set(AttentionKind)
    assert FULL.rounds >= 3
