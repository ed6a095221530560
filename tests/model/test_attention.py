"""Multi-head attention in eager PyTorch: beside its formula, PyTorch's own module and published examples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils.flop_counter import FlopCounterMode

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import PRESETS, build_preset
from tests.model.reference import ATOL, FLOAT32_ATOL, RTOL, Case, attention, cases
from tests.support.tables import GOLDEN_TABLES, TABLES, GoldenTable


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


@given(case=cases())
def test_operations_are_those_that_pytorch_counts(case: Case) -> None:
    config, (batch, _, query_length, key_length) = case.module.config, case.may_attend.shape
    rows = query_length * config.flops_per_query + key_length * config.flops_per_key
    with FlopCounterMode(display=False) as counted:
        case.run(return_weights=True)
    assert counted.get_total_flops() == batch * (rows + query_length * key_length * config.flops_per_pair)


def test_twelve_heads_of_width_768_have_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        module = MultiHeadAttention(PRESETS["multi-head-768x12"].config)
    published = TABLES["parameter_count"]["parameters"]
    assert sum(parameter.numel() for parameter in module.parameters()) == published == 2_360_064
