import numpy as np
import pytest

from benchmarks.arrivals import poisson
from benchmarks.batches import ONE_BY_ONE, PADDED, ways
from benchmarks.workload import Kind, Lengths, Model, sequences

MIXED = Lengths(512, mixed=True)


def test_a_mix_is_lognormal_and_the_same_every_time() -> None:
    lengths = MIXED.draw(64)

    assert lengths == MIXED.draw(64)
    assert lengths != sorted(lengths)
    assert min(lengths) == 1
    assert 400 < max(lengths) <= 512
    assert 45 < np.mean(lengths) < 60
    assert np.isclose(np.median(lengths), 512 / 20, atol=2)


def test_one_length_is_no_mix() -> None:
    assert Lengths(6).draw(3) == [6, 6, 6]


@pytest.mark.parametrize("kind", Kind)
def test_sequences_have_the_lengths_drawn(kind: Kind) -> None:
    found = sequences(Model(kind, 64, 4), MIXED)

    lengths = MIXED.draw(64)
    assert [len(one[0]) for one in found] == lengths
    if kind is Kind.CROSS:
        assert [len(one[1]) for one in found] == [*lengths[1:], lengths[0]]
    assert all(array.dtype == np.float32 and array.shape[1] == 64 for one in found for array in one)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("lengths", [Lengths(6), MIXED], ids=lambda lengths: lengths.name)
def test_every_way_computes_the_same_rows(kind: Kind, lengths: Lengths) -> None:
    found = ways(Model(kind, 64, 4), lengths, 8)

    single = {sum(batch.sequences for batch in found[ONE_BY_ONE])}
    assert single == {lengths.pool}
    assert all(batch.sequences == 8 for batch in found[PADDED])
    # A small pool repeats, so that it fills one batch.
    rows = sum(batch.tokens for batch in found[ONE_BY_ONE])
    assert sum(batch.tokens for batch in found[PADDED]) == rows * max(1, 8 // lengths.pool)


def test_padding_is_zero_and_its_lengths_are_the_keys() -> None:
    model = Model(Kind.CROSS, 64, 4)
    first, *_ = ways(model, MIXED, 8)[PADDED]

    assert first.key_lengths is not None
    for row, sequence, length in zip(
        first.inputs["key"], sequences(model, MIXED), first.key_lengths, strict=False
    ):
        assert np.array_equal(row[:length], sequence[1])
        assert not row[length:].any()


def test_arrivals_are_poisson() -> None:
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
def test_arrivals_need_a_rate_and_a_time(rate: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        poisson(rate, seconds, seed=0)
