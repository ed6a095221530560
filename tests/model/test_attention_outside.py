"""The module beside PyTorch's own attention, and beside the published worked examples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from tests.model.reference import ATOL, RTOL, random_module
from tests.support.tables import GOLDEN_TABLES, GoldenTable, linear_layers

SMALL = st.integers(1, 5)


def masks(rng: np.random.Generator, *shape: int) -> Tensor:
    """Random masks. Each row may attend to its first key: PyTorch returns NaN for a fully masked row."""
    mask = torch.from_numpy(rng.random(shape) < 0.5)
    mask[..., 0] = True
    return mask


@settings(deadline=None)
@given(
    sizes=st.tuples(SMALL, SMALL, SMALL, SMALL, SMALL),
    causal=st.booleans(),
    masked=st.booleans(),
    return_weights=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_one_head_with_identity_projections_is_scaled_dot_product_attention(
    sizes: tuple[int, int, int, int, int], *, causal: bool, masked: bool, return_weights: bool, seed: int
) -> None:
    batch, query_length, key_length, d_k, d_v = sizes
    config = AttentionConfig(
        d_query=d_k, d_value=d_v, d_v=d_v, cross=True, separate_value=True, out_proj=False, causal=causal
    )
    module, rng = MultiHeadAttention(config).double(), np.random.default_rng(seed)
    with torch.no_grad():
        for projection in linear_layers(module):
            nn.init.eye_(projection.weight)
    query, key, value = (
        torch.from_numpy(rng.standard_normal((batch, length, width)))
        for length, width in ((query_length, d_k), (key_length, d_k), (key_length, d_v))
    )
    mask = masks(rng, batch, 1, query_length, key_length) if masked else None
    context, _ = module(query, key, value, attention_mask=mask, return_weights=return_weights)
    allowed = torch.ones(query_length, key_length, dtype=torch.bool) if mask is None else mask[:, 0]
    expected = scaled_dot_product_attention(query, key, value, allowed.tril() if causal else allowed)
    torch.testing.assert_close(context, expected, rtol=RTOL, atol=ATOL)


def torch_module(module: MultiHeadAttention) -> nn.MultiheadAttention:
    """PyTorch's module with the same weights."""
    config = module.config
    other = nn.MultiheadAttention(
        config.d_query,
        config.num_heads,
        kdim=config.d_key,
        vdim=config.d_value,
        batch_first=True,
        dtype=torch.float64,
    )
    parts = linear_layers(module)
    with torch.no_grad():
        if other.in_proj_weight is not None:
            other.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        else:
            for name, part in zip("qkv", parts, strict=True):
                other.get_parameter(f"{name}_proj_weight").copy_(part.weight)
        other.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        assert module.output is not None
        other.out_proj.load_state_dict(module.output.state_dict())
    return other.eval()


@settings(deadline=None)
@given(
    num_heads=st.integers(1, 4),
    widths=st.tuples(SMALL, SMALL, SMALL),
    lengths=st.tuples(SMALL, SMALL, SMALL),
    per_head=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_the_module_equals_that_of_pytorch_with_the_same_weights(
    num_heads: int,
    widths: tuple[int, int, int],
    lengths: tuple[int, int, int],
    *,
    per_head: bool,
    seed: int,
) -> None:
    d_k, d_key, d_value = widths
    batch, query_length, key_length = lengths
    config = AttentionConfig(
        d_query=num_heads * d_k,
        num_heads=num_heads,
        d_key=d_key,
        d_value=d_value,
        d_v=d_k,
        qkv_bias=True,
        cross=True,
        separate_value=True,
    )
    rng = np.random.default_rng(seed)
    module = random_module(config, rng)
    inputs = [
        torch.from_numpy(rng.standard_normal((batch, length, width)))
        for length, width in ((query_length, config.d_query), (key_length, d_key), (key_length, d_value))
    ]
    mask = masks(rng, batch, num_heads if per_head else 1, query_length, key_length)
    context, weights = module(*inputs, attention_mask=mask, return_weights=True)
    hidden = ~mask.expand(batch, num_heads, query_length, key_length).flatten(0, 1)  # (B * H, Tq, Tk)
    expected = torch_module(module)(*inputs, attn_mask=hidden, average_attn_weights=False)
    torch.testing.assert_close((context, weights), expected, rtol=RTOL, atol=ATOL)


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


def test_there_are_eleven_published_tables() -> None:
    assert len({table.id for table in GOLDEN_TABLES}) == 11
