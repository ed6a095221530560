"""Dropout on attention weights: a feature of training. tests/parity shows that exports do not have it."""

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig

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


def test_it_has_no_effect_in_evaluation() -> None:
    module = MultiHeadAttention(AttentionConfig(d_query=4, num_heads=2, dropout=0.9)).eval()
    first, weighted, second = (
        module(rows(0, 2, 5, 4), return_weights=each)[0] for each in (False, True, False)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, weighted)
