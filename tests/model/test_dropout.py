"""Dropout on attention weights: a feature of training, without trace in evaluation and in graphs."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from attention_serving.artifact.manifest import GraphKind
from attention_serving.export.graph import export_graph
from attention_serving.export.signature import random_inputs, run_eager
from attention_serving.export.spec import attention_spec
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig, ConfigError
from tests.support.eager import assert_parity

PATHS = pytest.mark.parametrize(
    "return_weights", [pytest.param(False, id="context only"), pytest.param(True, id="with weights")]
)
DROPOUTS = pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9], ids="p {}".format)
TQ, TK = 30, 20


def rows(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def bare(dropout: float, **options: Any) -> MultiHeadAttention:
    """Its context vectors are its attention weights where the values are unit vectors."""
    return MultiHeadAttention(
        AttentionConfig(
            d_query=4,
            d_value=TK,
            cross=True,
            separate_value=True,
            projections="none",
            out_proj=False,
            dropout=dropout,
            **options,
        )
    )


def weights_in_training(module: MultiHeadAttention, seed: int, *, return_weights: bool) -> Tensor:
    torch.manual_seed(seed)
    context, weights = module.train()(*inputs(), return_weights=return_weights)
    assert not return_weights or torch.equal(weights[:, 0], context)
    found: Tensor = context
    return found


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return rows(0, 2, TQ, 4), rows(1, 2, TK, 4), torch.eye(TK).expand(2, TK, TK)


@PATHS
@DROPOUTS
def test_a_weight_is_dropped_or_scaled_up_in_training(dropout: float, return_weights: bool) -> None:
    module = bare(dropout)
    expected, _ = module.eval()(*inputs())
    found = weights_in_training(module, 5, return_weights=return_weights)
    kept = found != 0
    torch.testing.assert_close(found[kept], expected[kept] / (1 - dropout), rtol=1e-5, atol=1e-7)
    assert (found[~kept] == 0).all()
    # Of 1200 weights; the share of dropped ones has a standard deviation of 0.015 for a dropout of one half.
    assert abs((~kept).float().mean().item() - dropout) < 0.06


@PATHS
def test_one_seed_gives_one_result(return_weights: bool) -> None:
    first, again, other = (
        weights_in_training(bare(0.5), seed, return_weights=return_weights) for seed in (5, 5, 6)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rows_that_attend_to_nothing_stay_so_in_training() -> None:
    mask = torch.ones(2, 1, TQ, TK, dtype=torch.bool)
    mask[:, :, ::2] = False
    torch.manual_seed(5)
    context, weights = bare(0.5).train()(*inputs(), attention_mask=mask, return_weights=True)
    assert (weights[:, :, ::2] == 0).all()
    assert (weights[:, :, 1::2] != 0).any()
    assert torch.isfinite(context).all()


CONFIG = AttentionConfig(d_query=4, num_heads=2, qkv_bias=True)


def attention(dropout: float) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(replace(CONFIG, dropout=dropout))


@PATHS
@DROPOUTS
def test_it_has_no_effect_in_evaluation(dropout: float, return_weights: bool) -> None:
    query = rows(0, 2, 5, 4)
    with torch.inference_mode():
        one, other = (attention(p).eval()(query, return_weights=return_weights) for p in (dropout, 0.0))
        training = attention(dropout).train()(query, return_weights=return_weights)
    assert torch.equal(one[0], other[0])
    assert (one[1] is None and other[1] is None) or torch.equal(one[1], other[1])
    assert not torch.equal(training[0], one[0])


KINDS = pytest.mark.parametrize("kind", [GraphKind.PLAIN, GraphKind.WEIGHTS])


@cache
def graph(dropout: float, kind: GraphKind) -> onnx.ModelProto:
    """The graph of a module that was in training."""
    spec = attention_spec(attention(dropout).train())
    return export_graph(spec.module, next(s for s in spec.signatures if s.kind is kind))


@KINDS
def test_a_graph_has_no_dropout_and_equals_evaluation(kind: GraphKind) -> None:
    proto = graph(0.5, kind)
    assert proto.graph.node
    assert not [node.op_type for node in proto.graph.node if "Dropout" in node.op_type]
    assert not [node.op_type for node in proto.graph.node if "Random" in node.op_type]
    module = attention(0.0).eval()
    signature = next(s for s in attention_spec(module).signatures if s.kind is kind)
    sizes = {"batch": 2, "query_length": 9, "mask_heads": 1}
    values = random_inputs(signature, sizes, np.random.default_rng(1))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    eager = run_eager(module, signature, values)
    for name, found in zip(eager, session.run(list(eager), values), strict=True):
        assert_parity(found, eager[name])


@KINDS
@pytest.mark.parametrize("other", [0.0, 0.9], ids="p {}".format)
def test_graphs_of_different_dropouts_are_the_same_bytes(other: float, kind: GraphKind) -> None:
    one, two = (graph(p, kind).SerializeToString(deterministic=True) for p in (0.5, other))
    assert one == two


@pytest.mark.parametrize(
    "dropout",
    [1.0, 1, 1.5, -0.1, float("nan"), float("inf"), True, "0.1"],
    ids=["1.0", "1", "above 1", "negative", "nan", "infinite", "true", "text"],
)
def test_values_other_than_a_probability_below_1_are_refused(dropout: Any) -> None:
    with pytest.raises(ConfigError, match="must be a number from 0 to below 1") as refusal:
        AttentionConfig(d_query=4, dropout=dropout)
    assert refusal.value.field == "dropout"
