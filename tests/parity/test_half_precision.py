"""FP16 and BF16 on the wire: what eager PyTorch computes in fp32 from the same rounded numbers, rounded."""

from typing import Any

import numpy as np
import pytest
import torch
from attention_client import AttendInputs, AttentionClient

from scripts.local_server import ServerProcess
from tests.support.eager import Array, attend
from tests.support.systems import build

pytestmark = pytest.mark.thorough
SELF, WIDTH = "multi-head-64x4", 64
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# One unit in the last place, relative, and what rounding adds near zero.
LAST_PLACE = {"fp16": 2**-10, "bf16": 2**-7}
NEAR_ZERO = 1e-5
EACH = pytest.mark.parametrize("wire", HALVES)


def queries(*lengths: int) -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((length, WIDTH), dtype=np.float32) for length in lengths]


def rounded(array: Array, wire: str) -> Array:
    """The numbers that the type of the wire has for those of an array."""
    found: Array = torch.from_numpy(array).to(HALVES[wire]).float().numpy()
    return found


def assert_rounded(found: Array, eager: Array, wire: str) -> None:
    """`found` is `eager` in the type of the wire, up to one unit in the last place."""
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, rounded(found, wire))
    np.testing.assert_allclose(found, eager, rtol=LAST_PLACE[wire], atol=NEAR_ZERO)


@EACH
def test_results_and_weights_of_a_list(server: ServerProcess, wire: Any) -> None:
    inputs = queries(7, 1, 130)
    with AttentionClient(server.target, wire=wire) as client:
        result = client.attend(SELF, inputs, return_weights=True)
        (streamed,) = client.attend_stream(SELF, [AttendInputs(inputs)])
    assert result.attention_weights is not None
    for query, context, weights in zip(inputs, result.context_vectors, result.attention_weights, strict=True):
        eager_context, eager_weights = attend(build(SELF), rounded(query, wire))
        assert_rounded(context, eager_context, wire)
        assert_rounded(weights, eager_weights, wire)
    for found, context in zip(streamed.context_vectors, result.context_vectors, strict=True):
        assert_rounded(found, context, wire)
