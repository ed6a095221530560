"""What is sent: lengths, sequences, padding, arrivals. A run compares the answers of every protocol."""

import numpy as np
import pytest

from benchmarks.compute import pad
from benchmarks.load import poisson
from benchmarks.workload import AttentionKind, Lengths, Model, sequences

CROSS = Model(AttentionKind.CROSS, 64, 4)
MIXED = Lengths(512, mixed=True)


def test_mixed_lengths_are_lognormal_and_reproducible() -> None:
    lengths = MIXED.draw(64)
    assert lengths == MIXED.draw(64)
    assert lengths != sorted(lengths)
    assert min(lengths) == 1
    assert 400 < max(lengths) <= 512
    assert 45 < np.mean(lengths) < 60
    assert Lengths(6).draw(3) == [6, 6, 6]


def test_a_key_is_as_long_as_the_next_query_and_padding_is_zero() -> None:
    found, lengths = sequences(CROSS, MIXED), MIXED.draw(64)
    assert [len(query) for query, _ in found] == lengths
    assert [len(key) for _, key in found] == [*lengths[1:], lengths[0]]
    batch = pad(CROSS, found[:8])
    assert batch.key_lengths is not None
    assert (batch.sequences, batch.tokens) == (8, sum(lengths[:8]))
    for row, (_, key), length in zip(batch.inputs["key"], found[:8], batch.key_lengths, strict=True):
        assert np.array_equal(row[:length], key)
        assert not row[length:].any()


def test_arrivals_are_a_reproducible_poisson_process() -> None:
    due = poisson(1000, 20, seed=3)
    assert np.array_equal(due, poisson(1000, 20, seed=3))
    assert len(due) == 20_000
    assert 0 <= due[0] <= due[-1] < 20e9
    # Exponential gaps have a standard deviation equal to their mean.
    assert np.isclose(np.diff(due).std(), 1e6, rtol=0.05)
    with pytest.raises(ValueError, match="must be positive"):
        poisson(0, 1, seed=0)
