"""The configuration: derived values, refusals and cost figures."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_serving.model.config import AttentionConfig, ConfigError

SIZES = st.integers(1, 12)


@pytest.mark.parametrize(
    ("given_fields", "derived"),
    [
        pytest.param(
            {"d_query": 12, "num_heads": 3},
            {"d_key": 12, "d_value": 12, "d_k": 4, "d_v": 4, "d_out": 12, "scale": 0.5},
            id="multi-head",
        ),
        pytest.param(
            {"d_query": 3, "d_k": 2, "d_v": 5, "num_heads": 4, "out_proj": False},
            {"d_key": 3, "d_value": 3, "d_out": 20, "scale": 1 / math.sqrt(2)},
            id="concatenated-heads-without-output-projection",
        ),
        pytest.param(
            {"d_query": 6, "d_key": 10, "cross": True},
            {"d_value": 10, "d_k": 6, "d_v": 6, "d_out": 6},
            id="cross-value-is-the-key",
        ),
        pytest.param(
            {"d_query": 6, "d_key": 10, "d_value": 4, "cross": True, "separate_value": True},
            {"d_key": 10, "d_value": 4, "d_k": 6, "d_v": 6, "d_out": 6},
            id="cross-with-a-value-of-its-own",
        ),
        pytest.param(
            {"d_query": 7, "num_heads": 2, "d_k": 9},
            {"d_v": 9, "d_out": 7, "scale": 1 / 3},
            id="d_v-follows-a-given-d_k",
        ),
    ],
)
def test_a_field_that_is_left_out_takes_the_value_stated_beside_it(
    given_fields: dict[str, Any], derived: dict[str, float]
) -> None:
    config = AttentionConfig(**given_fields)
    assert {name: getattr(config, name) for name in derived} == derived


@given(d_query=SIZES, num_heads=SIZES, d_k=SIZES, d_v=SIZES, out_proj=st.booleans(), cross=st.booleans())
def test_a_configuration_rebuilt_from_its_own_fields_is_the_same(
    d_query: int, num_heads: int, d_k: int, d_v: int, *, out_proj: bool, cross: bool
) -> None:
    config = AttentionConfig(
        d_query=d_query, num_heads=num_heads, d_k=d_k, d_v=d_v, out_proj=out_proj, cross=cross
    )
    values = dataclasses.asdict(config)
    assert AttentionConfig(**values) == config
    assert None not in values.values()


REFUSED = [
    *(
        pytest.param(
            {"d_query": 4, "d_k": 2, "cross": True} | {name: bad},
            name,
            "positive integer",
            id=f"{name}={bad!r}",
        )
        for name in ("d_query", "num_heads", "d_key", "d_value", "d_k", "d_v", "d_out")
        for bad in (0, -3, 2.0, True, "4")
    ),
    *(
        pytest.param({"d_query": 4, "scale": bad}, "scale", "positive finite number", id=f"scale={bad!r}")
        for bad in (0, -1.0, math.inf, math.nan, True, "1")
    ),
    *(
        pytest.param({"d_query": 4, "cross": True} | {name: 1}, name, "must be true or false", id=f"{name}=1")
        for name in ("cross", "separate_value", "qkv_bias", "out_proj", "out_bias", "causal")
    ),
    pytest.param(
        {"d_query": 10, "num_heads": 4}, "num_heads", "must divide d_query=10", id="heads-do-not-divide"
    ),
    pytest.param({"d_query": 4, "d_key": 5}, "d_key", "d_query=4 unless cross", id="d_key-without-cross"),
    pytest.param(
        {"d_query": 4, "separate_value": True}, "separate_value", "needs cross", id="value-without-cross"
    ),
    pytest.param(
        {"d_query": 4, "d_value": 5, "cross": True},
        "d_value",
        "d_key=4 unless separate_value",
        id="d_value-without-separate_value",
    ),
    pytest.param(
        {"d_query": 4, "num_heads": 2, "d_v": 3, "d_out": 4, "out_proj": False},
        "d_out",
        "num_heads * d_v = 6",
        id="d_out-without-output-projection",
    ),
]


@pytest.mark.parametrize(("values", "field", "rule"), REFUSED)
def test_a_broken_rule_is_refused_by_field_value_and_rule(
    values: dict[str, Any], field: str, rule: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        AttentionConfig(**values)
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field}={values[field]!r}: ")
    assert rule in str(refusal.value)


def test_a_configuration_cannot_be_changed() -> None:
    config = AttentionConfig(d_query=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_query = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "per_query", "per_key", "per_pair"),
    [
        # 2 * (8 * 8 query + 8 * 8 output), 2 * (8 * 8 key + 8 * 8 value), 2 * (8 + 8)
        pytest.param({"d_query": 8, "num_heads": 2}, 256, 256, 32, id="multi-head"),
        # 2 * 3 * 2 * 4, 2 * 2 * (5 * 4 + 6 * 7), 2 * 2 * (4 + 7)
        pytest.param(
            {
                "d_query": 3, "d_key": 5, "d_value": 6, "num_heads": 2, "d_k": 4, "d_v": 7,
                "cross": True, "separate_value": True, "out_proj": False,
            },
            48,
            248,
            44,
            id="cross-of-six-widths",
        ),
    ],
)  # fmt: skip
def test_operations_equal_those_counted_by_hand(
    values: dict[str, Any], per_query: int, per_key: int, per_pair: int
) -> None:
    config = AttentionConfig(**values)
    counted = (config.flops_per_query, config.flops_per_key, config.flops_per_pair)
    assert counted == (per_query, per_key, per_pair)


@pytest.mark.parametrize(
    ("out_proj", "multiply_accumulates"),
    [
        pytest.param(False, 288, id="three-projections"),
        pytest.param(True, 384, id="and-an-output-projection"),
    ],
)
def test_linear_operations_equal_the_published_count(*, out_proj: bool, multiply_accumulates: int) -> None:
    batch, length = 3, 2
    config = AttentionConfig(d_query=4, qkv_bias=True, out_proj=out_proj)
    counted = batch * length * (config.flops_per_query + config.flops_per_key)
    assert counted == 2 * multiply_accumulates
