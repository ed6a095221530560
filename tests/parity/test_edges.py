"""Edge cases on every path: no key to attend to, one token, NaN, infinity, huge and denormal numbers."""

from functools import cache

import numpy as np
import pytest
from attention_client import AttentionClient

from attention_serving.model.presets import build_preset
from tests.parity import paths
from tests.support.eager import Array, assert_parity
from tests.support.modules import CAUSAL_CROSS, causal_cross

SELF, CAUSAL, CROSS = "multi-head-64x4", "causal-768x12", "cross-768x12"


@cache
def build(name: str) -> paths.Module:
    return causal_cross() if name == CAUSAL_CROSS else build_preset(name)


def normal(*shape: int, scale: float = 1.0) -> Array:
    array: Array = np.random.default_rng(5).standard_normal(shape, np.float32) * np.float32(scale)
    return array


def with_nan(*shape: int) -> Array:
    array = normal(*shape)
    array[1, 4, 3] = np.nan
    return array


def with_infinity(*shape: int) -> Array:
    array = normal(*shape)
    array[1, 4, 3] = np.inf
    return array


def masked(case: paths.Case, heads: int) -> paths.Case:
    query = case["query"]
    shape = (len(query), heads, query.shape[1], case.get("key", query).shape[1])
    mask = np.random.default_rng(6).random(shape) < 0.6
    mask[0] = False
    return case | {"attention_mask": mask}


def crossing(query_length: int, key_length: int) -> paths.Case:
    key = normal(1, key_length, 768)
    return {"query": normal(1, query_length, 768), "key": key, "value": key + 1}


HUGE = 1e4
EDGES: dict[str, tuple[str, paths.Case]] = {
    "no key to attend to": (SELF, masked({"query": normal(2, 5, 64)}, 4)),
    "no key to attend to, causal": (CAUSAL, masked({"query": normal(2, 5, 768)}, 12)),
    "one token": (SELF, {"query": normal(1, 1, 64)}),
    "one token, causal": (CAUSAL, {"query": normal(1, 1, 768)}),
    "one query, many keys": (
        CROSS,
        {"query": normal(1, 1, 768), "key": normal(1, 40, 768), "value": normal(1, 40, 768)},
    ),
    "many queries, one key": (
        CROSS,
        {"query": normal(1, 40, 768), "key": normal(1, 1, 768), "value": normal(1, 1, 768)},
    ),
    "causal, fewer queries than keys": (CAUSAL_CROSS, {"query": normal(2, 5, 16), "key": normal(2, 12, 16)}),
    "causal, more queries than keys": (CAUSAL_CROSS, {"query": normal(2, 12, 16), "key": normal(2, 5, 16)}),
    "causal and masked, fewer queries": (
        CAUSAL_CROSS,
        masked({"query": normal(2, 5, 16), "key": normal(2, 12, 16)}, 2),
    ),
    "NaN in one sequence": (SELF, {"query": with_nan(4, 7, 64)}),
    "NaN in one sequence, causal": (CAUSAL, {"query": with_nan(4, 7, 768)}),
    "infinity in one sequence": (SELF, {"query": with_infinity(4, 7, 64)}),
    "huge": (SELF, {"query": normal(3, 7, 64, scale=HUGE)}),
    "huge, causal": (CAUSAL, {"query": normal(3, 7, 768, scale=HUGE)}),
    "denormal": (SELF, {"query": normal(3, 7, 64, scale=1e-40)}),
    "denormal, causal": (CAUSAL, {"query": normal(3, 7, 768, scale=1e-40)}),
}


@pytest.mark.parametrize("path", paths.SERVED)
@pytest.mark.parametrize(("name", "case"), EDGES.values(), ids=EDGES)
def test_equals_eager(routes: paths.Routes, name: str, case: paths.Case, path: str) -> None:
    found, expected = routes[path](name, case), paths.eager(build(name), case)
    # Rounding errors grow with the numbers that are summed, and the tolerance grows with them.
    finite = case["query"][np.isfinite(case["query"])]
    scale = max(1.0, float(finite.std()))
    assert_parity(found["context_vectors"], expected["context_vectors"], scale=scale)
    assert_parity(found["attention_weights"], expected["attention_weights"])


def test_a_nan_stays_in_its_own_sequence(client: AttentionClient) -> None:
    context = client.attend(SELF, with_nan(4, 7, 64)).context_vectors
    assert np.isnan(context[1]).all()
    assert np.isfinite(context[[0, 2, 3]]).all()
