"""Graphs in blocks: derived from whole graphs, equal to them for every number of rows, or refused."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest

from attention_serving.artifact.golden import Arrays
from attention_serving.artifact.manifest import IN_BLOCKS, GraphKind
from attention_serving.export.blocks import NotInBlocksError, split_into_blocks
from attention_serving.export.signature import random_inputs
from attention_serving.model.config import AttentionConfig
from tests.export.modules import attention, signature, traced
from tests.support.eager import assert_parity

TQ, TK = 7, 5
# Fewer than one, one, a few, all, more than all.
ROWS = (-1, 0, 1, 2, 3, 7, 1000)
PLAIN, MASK = IN_BLOCKS
CROSS = AttentionConfig(
    d_query=4, d_key=5, d_value=6, num_heads=2, d_k=3, d_v=7, d_out=8, cross=True, separate_value=True
)
ALIBI = AttentionConfig(d_query=4, num_heads=2, alibi=True, causal=True)
ROTARY = AttentionConfig(d_query=8, num_heads=4, num_kv_heads=2, causal=True, rotary_theta=100.0)
CASES = {"cross, mask": (CROSS, MASK), "causal ALiBi, mask": (ALIBI, MASK), "causal rotary": (ROTARY, PLAIN)}


def run(model: onnx_ir.Model, inputs: Mapping[str, Any]) -> list[Any]:
    proto = onnx_ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs: list[Any] = session.run(None, inputs)
    return outputs


@pytest.mark.parametrize(("config", "kind"), CASES.values(), ids=CASES)
def test_blocks_of_any_number_of_rows_give_the_result_of_the_whole(
    config: AttentionConfig, kind: GraphKind
) -> None:
    sizes = {"batch": 2, "query_length": TQ, "key_length": TK, "mask_heads": config.num_heads}
    inputs: Arrays = random_inputs(signature(attention(config), kind), sizes, np.random.default_rng(1))
    if "attention_mask" in inputs:
        inputs["attention_mask"][1, :, 3] = False
    whole = traced(config, kind)
    before = onnx_ir.to_proto(whole).SerializeToString(deterministic=True)
    derived = split_into_blocks(whole, causal=config.causal)
    assert onnx_ir.to_proto(whole).SerializeToString(deterministic=True) == before
    operators = [node.op_type for node in derived.graph]
    assert operators.count("Loop") == 1
    # No operator outside of the loops spans all pairs of rows.
    assert set(operators).isdisjoint({"Attention", "Trilu", "Where", "And", "Abs"})
    (expected,) = run(whole, inputs)
    for rows in ROWS:
        (found,) = run(derived, {**inputs, "block_rows": np.array(rows)})
        assert_parity(found, expected)


HEADS = "float[B, 2, T, 3] q, float[B, 2, S, 3] k, float[B, 2, S, 3] v"
Y = "(float[B, 2, T, 3] y)"
REFUSED = {
    "no attention": ("g (float[T] x) => (float[T] y) { y = Abs(x) }", "no Attention"),
    "scores": (
        f"g ({HEADS}) => (float[B, 2, T, 3] y, float[B, 2, T, S] w) {{ y, , , w = Attention(q, k, v) }}",
        "outputs beside the context",
    ),
    "causal and a mask": (
        f"g ({HEADS}, bool[T, S] m) => {Y} {{ y = Attention<is_causal = 1>(q, k, v, m) }}",
        "causal and takes a mask",
    ),
    "a mask of an unknown operator": (
        f"g ({HEADS}, float[T, S] m) => {Y} {{ n = Softmax(m) y = Attention(q, k, v, n) }}",
        "computed by Softmax",
    ),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_graph_without_a_form_in_blocks_is_refused(text: str, reason: str) -> None:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23]> {text}')
    model = onnx_ir.passes.common.ShapeInferencePass()(onnx_ir.from_proto(proto)).model
    with pytest.raises(NotInBlocksError, match=reason):
        split_into_blocks(model, causal=False)
