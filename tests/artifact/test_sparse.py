"""Weights of token ids and skipped tokens, against sentence-transformers and by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_array_equal
from sentence_transformers.util import select_max_active_dims

from attention_serving.artifact.encoder import (
    LateInteractionFacts,
    SparseFacts,
    has_vectors,
    largest_weights,
    select_weights,
)

WIDTH = 40
FACTS = SparseFacts(width=WIDTH)
# Few distinct values, so that many are equal, and many are 0.
WEIGHTS = arrays(np.float32, WIDTH, elements=st.integers(-4, 4).map(float))


@given(WEIGHTS, st.integers(1, WIDTH + 3))
def test_the_largest_weights_are_those_of_the_library(weights: np.ndarray, most: int) -> None:
    ids, values = select_weights(np.arange(WIDTH), weights, FACTS, most)
    assert_array_equal(values, weights[ids])
    selected = select_max_active_dims(torch.from_numpy(weights)[None], most)[0].numpy()
    # Which of equal ones the library selects is not defined: here, those of the lowest ids.
    assert sorted(np.abs(weights[ids])) == sorted(np.abs(selected[selected != 0]))
    order = np.lexsort((np.arange(WIDTH), -np.abs(weights)))[:most]
    assert_array_equal(ids, sorted(at for at in order if weights[at]))


def test_hidden_ids_have_no_weight_and_nan_is_not_lost() -> None:
    weights = np.array([1, np.nan, 3, 0, 2, -4], np.float32)
    facts = SparseFacts(width=6, hidden_ids=(2,))
    expected = {0: [0, 1, 4, 5], 1: [1], 2: [1, 5], 3: [1, 4, 5]}
    for most, ids in expected.items():
        assert select_weights(np.arange(6), weights, facts, most)[0].tolist() == ids


def test_a_token_id_has_the_largest_weight_of_its_tokens() -> None:
    ids, weights = np.array([4, 2, 4, 0, 2, 5]), np.array([1, -2, 3, np.nan, -1, 0], np.float32)
    distinct, largest = largest_weights(ids, weights)
    assert distinct.tolist() == [0, 2, 4, 5]
    assert_array_equal(largest, [np.nan, -1, 3, 0])


@pytest.mark.parametrize(
    ("kinds", "kind", "first", "expected"),
    [
        (("document",), "query", False, [0, 1, 2, 3]),
        (("document",), "document", False, [0, 2]),
        (("document",), "", True, [2]),
        (("document",), "clustering", False, [0, 2]),
        (("query",), "query", True, [2]),
        (("query", "document"), "query", False, [0, 2]),
    ],
)
def test_skipped_tokens_by_kind(kinds: Any, kind: str, first: bool, expected: list[int]) -> None:
    facts = LateInteractionFacts(
        similarity="maxsim", skipped_ids=(9, 8), skipped_kinds=kinds, skips_first=first
    )
    assert np.flatnonzero(has_vectors(np.array([1, 9, 2, 8]), facts, kind)).tolist() == expected
