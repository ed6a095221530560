"""Multi-head attention in eager PyTorch beside its formula and published examples; dropout in training."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.positions import RotaryEmbedding, alibi_slopes
from tests.model.reference import ATOL, FLOAT32_ATOL, FLOAT32_RTOL, RTOL, Case, attention, cases
from tests.support.tables import GOLDEN_TABLES, GoldenTable


@settings(max_examples=300)
@given(case=cases())
def test_both_paths_equal_the_formula_computed_row_by_row(case: Case) -> None:
    """Every rule, projection and option, rows without keys included."""
    expected_context, expected_weights = map(torch.from_numpy, attention(case))
    config = case.module.config
    in_float32 = config.rotary_theta or config.qk_norm
    rtol, atol = (FLOAT32_RTOL, FLOAT32_ATOL) if in_float32 else (RTOL, ATOL)
    context, nothing = case.run(return_weights=False)
    assert nothing is None
    torch.testing.assert_close(context, expected_context, rtol=rtol, atol=atol)
    found = case.run(return_weights=True)
    torch.testing.assert_close(found, (expected_context, expected_weights), rtol=rtol, atol=atol)


@pytest.mark.parametrize("table", GOLDEN_TABLES, ids=lambda table: table.id)
def test_every_published_table_is_reproduced(table: GoldenTable) -> None:
    inputs = [torch.from_numpy(array) for array in table.inputs]
    batched = inputs[0].ndim == 3
    inputs = inputs if batched else [array[None] for array in inputs]
    with torch.inference_mode():
        context, _ = table.module()(*inputs)
        _, weights = table.module()(*inputs, return_weights=True)
    # Row 1 is the second; the tables of weights are those of one sequence and one head.
    answered = {
        "context_vectors": context if batched else context[0],
        "context_vectors_row_1": context[0, 1],
        "attention_weights": weights[0, 0],
        "attention_weights_row_1": weights[0, 0, 1],
    }
    assert table.expected
    for name, expected in table.expected.items():
        np.testing.assert_allclose(answered[name], expected, rtol=0, atol=table.tolerance, err_msg=name)


@given(case=cases())
def test_operations_are_those_that_pytorch_counts(case: Case) -> None:
    config, (batch, _, query_length, key_length) = case.module.config, case.may_attend.shape
    rows = query_length * config.flops_per_query + key_length * config.flops_per_key
    with FlopCounterMode(display=False) as counted:
        case.run(return_weights=True)
    assert counted.get_total_flops() == batch * (rows + query_length * key_length * config.flops_per_pair)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_frequencies_stay_float32_in_half_precision(dtype: torch.dtype, interleaved: bool) -> None:
    """A frequency rounded to half precision would be off by half a turn and more at such positions."""
    rng, rotary = np.random.default_rng(0), RotaryEmbedding(8, theta=100.0, interleaved=interleaved)
    heads = torch.from_numpy(rng.standard_normal((2, 3, 50, 8))).to(dtype)
    at = torch.from_numpy(rng.integers(0, 4096, (2, 50)))
    found, exact = rotary.to(dtype)(heads, at), rotary(heads.double(), at)
    assert found.dtype == dtype
    # Cosine, sine, two products and their sum, each rounded once, of numbers below 4.
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=5 * 4 * torch.finfo(dtype).eps)


def test_the_slopes_of_eight_heads_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


TQ, TK = 30, 20


def rows(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def trained(dropout: float, *, return_weights: bool) -> Tensor:
    """The weights in training: the context vectors where values are unit vectors."""
    config = AttentionConfig(
        d_query=4, d_value=TK, cross=True, separate_value=True, projections="none", out_proj=False,
        dropout=dropout,
    )  # fmt: skip
    mask = torch.ones(2, 1, TQ, TK, dtype=torch.bool)
    mask[:, :, ::2] = False
    torch.manual_seed(5)
    inputs = rows(0, 2, TQ, 4), rows(1, 2, TK, 4), torch.eye(TK).expand(2, TK, TK)
    module = MultiHeadAttention(config).train()
    found: Tensor = module(*inputs, attention_mask=mask, return_weights=return_weights)[0]
    return found


@pytest.mark.parametrize("return_weights", [False, True], ids=["context only", "with weights"])
@pytest.mark.parametrize("dropout", [0.1, 0.9], ids="p {}".format)
def test_a_weight_is_dropped_or_scaled_up_in_training(dropout: float, return_weights: bool) -> None:
    expected, found = (trained(each, return_weights=return_weights) for each in (0.0, dropout))
    kept = found != 0
    torch.testing.assert_close(found[kept], expected[kept] / (1 - dropout), rtol=1e-5, atol=1e-7)
    assert not found[:, ::2].any()  # rows that attend to nothing
    # Of 600 weights; the share of dropped ones has a standard deviation of 0.012.
    assert abs((~kept[:, 1::2]).float().mean().item() - dropout) < 0.05
