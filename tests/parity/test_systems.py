"""Every attention system on every path: eager, exported, attention.v1, Open Inference Protocol."""

from functools import cache

import numpy as np
import pytest

from attention_serving.model.presets import build_preset
from attention_serving.model.text import TextAttention
from tests.parity import paths
from tests.support.eager import assert_parity

# The numbers are the rows of the list of systems. Other tests cover rows 11, 12, 16 and 17 as well: dropout,
# masks, intermediate results and cost figures.
SYSTEMS = {
    "1 text to vectors": "sentence-self-attention",
    "2 simple self-attention": "simple-self-attention",
    "3 scaled dot-product attention": "scaled-dot-product-attention",
    "4 single-head self-attention": "self-attention",
    "5 linear layers, fused": "fused-self-attention",
    "6 concatenated multi-head": "concatenated-multi-head",
    "7 stacked multi-head": "stacked-multi-head",
    "8 split multi-head": "multi-head-768x12",
    "9 causal self-attention": "causal-self-attention",
    "10 causal multi-head": "causal-768x12",
    "11 dropout": "dropout-multi-head",
    "12 padding and full masks": "multi-head-64x4",
    "13 rotary multi-head": "rotary-768x12",
    "13 with grouped heads": "grouped-query-768x12x4",
    "ALiBi, causal": "alibi-768x12",
    "ALiBi, bidirectional": "alibi-bidirectional-64x4",
    "sliding window, causal": "sliding-window-768x12",
    "sliding window, bidirectional": "sliding-window-bidirectional-64x4",
    "14 single-head cross-attention": "cross-attention",
    "15 multi-head cross-attention": "cross-768x12",
}
BATCH, QUERY_LENGTH, KEY_LENGTH = 3, 9, 14
build = cache(build_preset)


def random_case(name: str, *, masked: bool) -> paths.Case:
    """Returns named tensors for one preset; if it takes positions, they do not count from 0."""
    rng = np.random.default_rng(11)
    module, config = build(name), build(name).config
    key_length = KEY_LENGTH if config.cross else QUERY_LENGTH
    if isinstance(module, TextAttention):
        case: paths.Case = {"token_ids": rng.integers(0, 6, (BATCH, QUERY_LENGTH))}
    else:
        case = {"query": rng.standard_normal((BATCH, QUERY_LENGTH, config.d_query), np.float32)}
    if config.cross:
        case["key"] = rng.standard_normal((BATCH, key_length, config.d_key), np.float32)
    if config.separate_value:
        case["value"] = rng.standard_normal((BATCH, key_length, config.d_value), np.float32)
    if config.rotary_theta:
        case["positions"] = rng.integers(0, 500, (BATCH, QUERY_LENGTH))
    mask = rng.random((BATCH, config.num_heads, QUERY_LENGTH, key_length)) < 0.6
    mask[0, :, 2] = False
    return case | {"attention_mask": mask} if masked else case


@pytest.mark.parametrize("masked", [False, True], ids=["every key", "masked"])
@pytest.mark.parametrize("path", paths.SERVED)
@pytest.mark.parametrize("name", SYSTEMS.values(), ids=SYSTEMS)
def test_equals_eager(routes: paths.Routes, name: str, path: str, masked: bool) -> None:
    case = random_case(name, masked=masked)
    found, expected = routes[path](name, case), paths.eager(build(name), case)
    for output in expected:
        assert_parity(found[output], expected[output])
    if masked:
        assert not found["attention_weights"][0, :, 2].any()
