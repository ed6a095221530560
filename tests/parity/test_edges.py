"""Edge cases over both protocols: NaN, infinity, huge and denormal numbers.

test_systems.py has sequences of one row, keys of any number, and rows that may attend to none.
"""

import numpy as np
import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess
from tests.parity import paths
from tests.support.eager import Array, assert_parity
from tests.support.systems import build

SELF, CAUSAL, LOCAL = "multi-head-64x4", "causal-768x12", "alibi-768x12"
WIDTH, NARROW = 64, 48


def normal(*shape: int, scale: float = 1.0) -> Array:
    array: Array = np.random.default_rng(5).standard_normal(shape, np.float32) * np.float32(scale)
    return array


def with_value(value: float, width: int) -> paths.Case:
    array = normal(4, 7, width)
    array[1, 4, 3] = value
    return {"query": array}


EDGES: dict[str, tuple[str, paths.Case]] = {
    "NaN in one sequence": (SELF, with_value(np.nan, WIDTH)),
    "NaN in one sequence, causal": (CAUSAL, with_value(np.nan, NARROW)),
    "NaN in one sequence, ALiBi in a window": (LOCAL, with_value(np.nan, NARROW)),
    "infinity in one sequence": (SELF, with_value(np.inf, WIDTH)),
    "huge": (SELF, {"query": normal(3, 7, WIDTH, scale=1e4)}),
    "huge, causal": (CAUSAL, {"query": normal(3, 7, NARROW, scale=1e4)}),
    "denormal": (SELF, {"query": normal(3, 7, WIDTH, scale=1e-40)}),
}


@pytest.mark.parametrize("path", paths.SERVED.values(), ids=paths.SERVED)
@pytest.mark.parametrize(("name", "case"), EDGES.values(), ids=EDGES)
def test_equals_eager(
    server: ServerProcess, client: AttentionClient, name: str, case: paths.Case, path: paths.Path
) -> None:
    found, expected = path(client, server.target, name, case), paths.eager(build(name), case)
    # Rounding errors grow with the numbers that are summed, and the tolerance grows with them.
    finite = case["query"][np.isfinite(case["query"])]
    scale = max(1.0, float(finite.std()))
    assert_parity(found["context_vectors"], expected["context_vectors"], scale=scale)
    assert_parity(found["attention_weights"], expected["attention_weights"])
    if not np.isfinite(case["query"]).all():
        assert not np.isfinite(found["context_vectors"][1]).all()
        assert np.isfinite(found["context_vectors"][[0, 2, 3]]).all()
