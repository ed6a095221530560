"""Dropout on attention weights: a feature of training. tests/parity shows that exports do not have it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig

TQ, TK = 30, 20
Attend = Callable[[float, int], Tensor]


def rows(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


INPUTS = rows(0, 2, TQ, 4), rows(1, 2, TK, 4), torch.eye(TK).expand(2, TK, TK)
MASK = torch.ones(2, 1, TQ, TK, dtype=torch.bool)
MASK[:, :, ::2] = False


@pytest.fixture(params=[False, True], ids=["context only", "with weights"])
def attend(request: pytest.FixtureRequest) -> Attend:
    """The weights in training, by dropout and seed: the context vectors where values are unit vectors."""

    def run(dropout: float, seed: int) -> Tensor:
        config = AttentionConfig(
            d_query=4, d_value=TK, cross=True, separate_value=True, projections="none", out_proj=False,
            dropout=dropout,
        )  # fmt: skip
        torch.manual_seed(seed)
        module = MultiHeadAttention(config).train()
        context, weights = module(*INPUTS, attention_mask=MASK, return_weights=request.param)
        assert not request.param or torch.equal(weights[:, 0], context)
        found: Tensor = context
        return found

    return run


@pytest.mark.parametrize("dropout", [0.1, 0.9], ids="p {}".format)
def test_a_weight_is_dropped_or_scaled_up_in_training(attend: Attend, dropout: float) -> None:
    expected, found = attend(0.0, 5), attend(dropout, 5)
    kept = found != 0
    torch.testing.assert_close(found[kept], expected[kept] / (1 - dropout), rtol=1e-5, atol=1e-7)
    assert not found[:, ::2].any()  # rows that attend to nothing
    # Of 600 weights; the share of dropped ones has a standard deviation of 0.012.
    assert abs((~kept[:, 1::2]).float().mean().item() - dropout) < 0.05


def test_it_has_no_effect_in_evaluation() -> None:
    module, query = MultiHeadAttention(AttentionConfig(d_query=4, num_heads=2, dropout=0.9)), rows(0, 2, 5, 4)
    found = [
        module.eval()(query, return_weights=return_weights)[0] for return_weights in (False, True, False)
    ]
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=0)
    torch.testing.assert_close(found[0], found[1])
