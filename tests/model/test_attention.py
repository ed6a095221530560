"""Multi-head attention in eager PyTorch: shapes, masks, causality and rows without keys."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import build_preset
from tests.model.reference import ATOL, RTOL, Case, attention, cases, random_module
from tests.support.tables import TABLES

PATHS = [pytest.param(False, id="context-only"), pytest.param(True, id="with-weights")]
LENGTHS = [
    pytest.param(1, 1, id="1x1"),
    pytest.param(2, 7, id="fewer-queries"),
    pytest.param(7, 2, id="fewer-keys"),
    pytest.param(6, 6, id="as-many"),
]


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=RTOL, atol=ATOL)


def cross_module(*, causal: bool = False) -> MultiHeadAttention:
    config = AttentionConfig(d_query=4, d_key=5, num_heads=2, d_k=3, d_v=2, cross=True, causal=causal)
    return random_module(config, np.random.default_rng(3))


def rows(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


@settings(deadline=None)
@given(case=cases())
def test_both_paths_equal_the_formula_computed_row_by_row(case: Case) -> None:
    expected_context, expected_weights = attention(case.module, case.inputs, case.may_attend)
    context, nothing = case.run(return_weights=False)
    assert nothing is None
    assert_close(context, torch.from_numpy(expected_context))
    context, weights = case.run(return_weights=True)
    assert weights is not None
    assert_close(context, torch.from_numpy(expected_context))
    assert_close(weights, torch.from_numpy(expected_weights))


@settings(deadline=None)
@given(case=cases())
def test_the_weights_of_a_row_add_up_to_one_or_attend_to_nothing(case: Case) -> None:
    _, weights = case.run(return_weights=True)
    assert weights is not None
    assert_close(weights.sum(-1), torch.from_numpy(case.may_attend.any(-1).astype(np.float64)))
    assert (weights[~torch.from_numpy(case.may_attend)] == 0).all()


@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS)
def test_shapes_follow_the_lengths_and_the_configuration(query_length: int, key_length: int) -> None:
    config = AttentionConfig(
        d_query=4, d_key=5, d_value=6, num_heads=3, d_k=2, d_v=7, d_out=8, cross=True, separate_value=True
    )
    module = MultiHeadAttention(config)
    inputs = torch.ones(2, query_length, 4), torch.ones(2, key_length, 5), torch.ones(2, key_length, 6)
    context, weights = module(*inputs, return_weights=True)
    assert context.shape == (2, query_length, 8)
    assert weights.shape == (2, 3, query_length, key_length)


@pytest.mark.parametrize("return_weights", PATHS)
def test_key_lengths_equal_cutting_the_keys(*, return_weights: bool) -> None:
    module, query, key = cross_module(), rows(0, 3, 4, 4), rows(1, 3, 6, 5)
    lengths = [1, 4, 6]
    context, weights = module(query, key, key_lengths=torch.tensor(lengths), return_weights=return_weights)
    for index, length in enumerate(lengths):
        one = slice(index, index + 1)
        alone, alone_weights = module(query[one], key[one, :length], return_weights=return_weights)
        assert_close(context[one], alone)
        if return_weights:
            assert_close(weights[one, :, :, :length], alone_weights)
            assert (weights[one, :, :, length:] == 0).all()


@pytest.mark.parametrize("causal", [pytest.param(False, id="full"), pytest.param(True, id="causal")])
def test_a_padded_sequence_has_the_context_vectors_it_has_alone(*, causal: bool) -> None:
    module = random_module(AttentionConfig(d_query=4, num_heads=2, causal=causal), np.random.default_rng(5))
    query, lengths = rows(2, 2, 7, 4), [3, 7]
    context, _ = module(query, key_lengths=torch.tensor(lengths))
    for index, length in enumerate(lengths):
        alone, _ = module(query[index : index + 1, :length])
        assert_close(context[index : index + 1, :length], alone)


@pytest.mark.parametrize("return_weights", PATHS)
def test_a_mask_for_all_heads_equals_one_for_each_head(*, return_weights: bool) -> None:
    module, query, key = cross_module(), rows(0, 2, 5, 4), rows(1, 2, 7, 5)
    mask = rows(2, 2, 1, 5, 7) > 0
    shared = module(query, key, attention_mask=mask, return_weights=return_weights)
    each = module(query, key, attention_mask=mask.expand(2, 2, 5, 7), return_weights=return_weights)
    assert_close(shared[0], each[0])
    assert (shared[1] is None and each[1] is None) or torch.equal(shared[1], each[1])


@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS)
def test_causal_weights_equal_masking_after_the_softmax_and_renormalising(
    query_length: int, key_length: int
) -> None:
    query, key = rows(0, 2, query_length, 4), rows(1, 2, key_length, 5)
    _, full = cross_module()(query, key, return_weights=True)
    _, causal = cross_module(causal=True)(query, key, return_weights=True)
    masked = full * torch.ones(query_length, key_length).tril()
    assert_close(causal, masked / masked.sum(-1, keepdim=True))


@pytest.mark.parametrize("return_weights", PATHS)
@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS)
def test_a_causal_row_sees_its_own_and_earlier_keys_only(
    query_length: int, key_length: int, *, return_weights: bool
) -> None:
    query, key = rows(0, 1, query_length, 4), rows(1, 1, key_length, 5)
    context, _ = cross_module(causal=True)(query, key, return_weights=return_weights)
    for row in range(query_length):
        seen, _ = cross_module()(query[:, row : row + 1], key[:, : row + 1])
        assert_close(context[:, row : row + 1], seen)


@pytest.mark.parametrize("return_weights", PATHS)
@pytest.mark.parametrize("rule", ["key_lengths", "attention_mask"])
@pytest.mark.parametrize("out_proj", [pytest.param(False, id="bare"), pytest.param(True, id="projected")])
def test_a_row_without_keys_is_zero_before_the_output(
    rule: str, *, out_proj: bool, return_weights: bool
) -> None:
    config = AttentionConfig(d_query=4, num_heads=2, qkv_bias=True, out_proj=out_proj)
    module = random_module(config, np.random.default_rng(1))
    rules = {"key_lengths": torch.tensor([0, 3]), "attention_mask": torch.ones(2, 1, 3, 3, dtype=torch.bool)}
    rules["attention_mask"][0] = False
    context, weights = module(rows(0, 2, 3, 4), **{rule: rules[rule]}, return_weights=return_weights)
    nothing = torch.zeros(4).double() if module.output is None else module.output.bias
    assert torch.equal(context[0], nothing.detach().expand(3, 4))
    assert not torch.isclose(context[1], nothing).all(-1).any()
    assert weights is None or (weights[0] == 0).all()


def test_twelve_heads_of_width_768_have_the_published_number_of_parameters() -> None:
    module = build_preset("multi-head-768x12")
    published = TABLES["parameter_count"]["parameters"]
    assert sum(parameter.numel() for parameter in module.parameters()) == published == 2_360_064
