"""Multi-head attention in eager PyTorch: beside its formula, PyTorch's own module and published examples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import PRESETS, build_preset
from tests.model.reference import ATOL, FLOAT32_ATOL, RTOL, Case, attention, cases, random_module
from tests.support.tables import GOLDEN_TABLES, TABLES, GoldenTable, linear_layers

SMALL = st.integers(1, 5)


@settings(max_examples=300)
@given(case=cases())
def test_both_paths_equal_the_formula_computed_row_by_row(case: Case) -> None:
    """Every rule, projection and option, rows without keys included."""
    expected_context, expected_weights = map(torch.from_numpy, attention(case))
    config = case.module.config
    atol = FLOAT32_ATOL if config.rotary_theta or config.qk_norm else ATOL
    context, nothing = case.run(return_weights=False)
    assert nothing is None
    torch.testing.assert_close(context, expected_context, rtol=RTOL, atol=atol)
    found = case.run(return_weights=True)
    torch.testing.assert_close(found, (expected_context, expected_weights), rtol=RTOL, atol=atol)


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
    mask = torch.from_numpy(rng.random((batch, num_heads if per_head else 1, query_length, key_length)) < 0.5)
    mask[..., 0] = True  # PyTorch returns NaN for a fully masked row
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


def test_simple_self_attention_has_no_parameters_and_no_scale() -> None:
    query = torch.randn(3, 6, 16)
    module = build_preset("simple-self-attention")
    assert not list(module.parameters())
    torch.testing.assert_close(module(query)[0], (query @ query.transpose(1, 2)).softmax(-1) @ query)


PUBLISHED = {
    "three projections": ({"out_proj": False}, 60, 288),
    "three projections, stacked": ({"projections": "stacked", "out_proj": False}, 60, 288),
    "fused, with an output projection": ({"projections": "fused"}, 80, 384),
}


@pytest.mark.parametrize(("options", "parameters", "macs"), PUBLISHED.values(), ids=PUBLISHED)
def test_parameters_and_operations_are_the_published_ones(
    options: dict[str, object], parameters: int, macs: int
) -> None:
    batch, length, width = 3, 2, 4
    config = AttentionConfig(d_query=width, qkv_bias=True, **options)  # type: ignore[arg-type]
    module = MultiHeadAttention(config)
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters
    linear = batch * length * (config.flops_per_query + config.flops_per_key)
    products = batch * length * length * config.flops_per_pair
    assert (linear, products) == (2 * macs, 2 * batch * length * length * 2 * width)
    with FlopCounterMode(display=False) as counted, torch.inference_mode():
        module(torch.ones(batch, length, width), return_weights=True)
    assert counted.get_total_flops() == linear + products


def test_twelve_heads_of_width_768_have_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        module = MultiHeadAttention(PRESETS["multi-head-768x12"].config)
    published = TABLES["parameter_count"]["parameters"]
    assert sum(parameter.numel() for parameter in module.parameters()) == published == 2_360_064
