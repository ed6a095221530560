"""The configuration: derived values, refusals and cost figures."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from attention_serving.model.config import AttentionConfig, ConfigError
from tests.model.reference import configs

DERIVED_VALUES = {
    "multi-head": (
        {"d_query": 12, "num_heads": 3},
        {"num_kv_heads": 3, "d_key": 12, "d_value": 12, "d_k": 4, "d_v": 4, "d_out": 12, "scale": 0.5},
    ),
    "cross": ({"d_query": 6, "d_key": 10, "cross": True}, {"d_value": 10, "d_k": 6, "d_v": 6, "d_out": 6}),
    "no projections": (
        {
            "d_query": 6, "d_value": 10, "num_heads": 2, "cross": True, "separate_value": True,
            "projections": "none", "out_proj": False,
        },
        {"d_k": 3, "d_v": 5, "d_out": 10},
    ),
    "a given d_k": ({"d_query": 7, "num_heads": 2, "d_k": 9}, {"d_v": 9, "d_out": 7, "scale": 1 / 3}),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "derived"), DERIVED_VALUES.values(), ids=DERIVED_VALUES)
def test_a_field_that_is_left_out_takes_the_value_stated_beside_it(
    fields: dict[str, Any], derived: dict[str, float]
) -> None:
    config = AttentionConfig(**fields)
    assert {name: getattr(config, name) for name in derived} == derived


@given(config=configs())
def test_a_configuration_rebuilt_from_its_own_fields_is_the_same(config: AttentionConfig) -> None:
    values = dataclasses.asdict(config)
    assert AttentionConfig(**values) == config
    assert None not in values.values()


CROSS = {"d_query": 4, "cross": True}
BARE = {"d_query": 4, "num_heads": 2, "projections": "none", "out_proj": False}
WIDTHS = ("d_query", "num_heads", "num_kv_heads", "d_key", "d_value", "d_k", "d_v", "d_out")
# Fields, the names of those that are replaced, with what, and the rule.
REFUSED_VALUES: list[tuple[dict[str, Any], Sequence[str], Sequence[object], str]] = [
    ({"d_query": 4, "d_k": 2, "cross": True}, WIDTHS, [0], "positive integer"),
    ({}, ["d_query"], [-3, 2.0, True, "4"], "positive integer"),
    ({"d_query": 4}, ["window"], [-1, 2.0, True], "positive integer"),
    ({"d_query": 4}, ["scale"], [0, -1.0, math.inf, math.nan, True], "positive finite"),
    ({"d_query": 4}, ["dropout"], [1.0, 1, -0.1, math.nan, True], "from 0 to below 1"),
    ({"d_query": 4}, ["qk_norm"], [-1.0, math.inf], "must be 0 or positive"),
    ({"d_query": 4}, ["rotary_theta"], [-1.0, math.inf, "1"], "positive finite"),
    (CROSS, ["cross", "qkv_bias", "causal", "alibi"], [1], "must be true or false"),
]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    *(
        (fields | {name: value}, name, rule)
        for fields, names, values, rule in REFUSED_VALUES
        for name in names
        for value in values
    ),
    ({"d_query": 4, "projections": "both"}, "projections", "must be one of separate, fused"),
    ({"d_query": 10, "num_heads": 4}, "num_heads", "must divide d_query=10"),
    ({"d_query": 4, "num_heads": 4, "num_kv_heads": 3}, "num_kv_heads", "must divide num_heads=4"),
    ({"d_query": 4, "d_key": 5}, "d_key", "d_query=4 unless cross"),
    ({"d_query": 4, "separate_value": True}, "separate_value", "needs cross"),
    (CROSS | {"d_value": 5}, "d_value", "d_key=4 unless separate_value"),
    (CROSS | {"projections": "fused"}, "projections", "must not be fused with cross"),
    (CROSS | {"alibi": True}, "alibi", "must be false with cross"),
    (CROSS | {"window": 3}, "window", "must be 0 with cross"),
    (CROSS | {"rotary_theta": 100.0}, "rotary_theta", "must be 0 with cross"),
    ({"d_query": 4, "alibi": True, "rotary_theta": 100.0}, "alibi", "must be false with rotary_theta"),
    ({"d_query": 6, "d_k": 3, "rotary_theta": 100.0}, "d_k", "must be even"),
    ({"d_query": 4, "rotary_interleaved": True}, "rotary_interleaved", "needs rotary_theta"),
    ({"d_query": 4, "d_v": 3, "d_out": 4, "out_proj": False}, "d_out", "num_heads * d_v = 3"),
    (BARE | {"d_k": 3}, "d_query", "must be num_heads * d_k = 6"),
    (BARE | {"cross": True, "d_key": 5}, "d_key", "must be num_kv_heads * d_k = 4"),
    (BARE | {"d_value": 4, "d_v": 3}, "d_value", "must be num_kv_heads * d_v = 6"),
    (BARE | {"qkv_bias": True}, "qkv_bias", "needs projections"),
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
