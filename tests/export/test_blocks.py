"""Graphs in blocks: derived from whole graphs, equal to them for every number of rows, or refused."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch

from attention_serving.artifact.golden import Arrays
from attention_serving.artifact.manifest import IN_BLOCKS, TensorSpec
from attention_serving.export.blocks import NotInBlocksError, in_blocks
from attention_serving.export.graph import trace
from attention_serving.export.signature import QUERY_AXIS, Signature, random_inputs, tensor
from attention_serving.model.config import AttentionConfig
from tests.export.modules import attention, signature, traced
from tests.support.eager import assert_parity
from tests.support.repository import encoder

TQ, TK = 7, 5
# Fewer than one, one, a few, all, more than all.
ROWS = (-1, 0, 1, 2, 3, 7, 1000)
PLAIN, MASK = IN_BLOCKS
CROSS = AttentionConfig(
    d_query=4, d_key=5, d_value=6, num_heads=2, d_k=3, d_v=7, d_out=8, cross=True, separate_value=True
)
WINDOW = AttentionConfig(d_query=4, num_heads=2, window=3, causal=True)
ALIBI = AttentionConfig(d_query=4, num_heads=2, alibi=True, causal=True)
ROTARY = AttentionConfig(d_query=8, num_heads=4, num_kv_heads=2, causal=True, rotary_theta=100.0)
CASES = {
    "cross, mask": (CROSS, MASK),
    "causal ALiBi, mask": (ALIBI, MASK),
    "causal rotary": (ROTARY, PLAIN),
}
FURTHER = {
    "grouped heads": (AttentionConfig(d_query=8, num_heads=4, num_kv_heads=2), PLAIN),
    "causal": (AttentionConfig(d_query=4, num_heads=2, causal=True), PLAIN),
    "causal cross, mask": (AttentionConfig(d_query=4, num_heads=2, causal=True, cross=True), MASK),
    "ALiBi": (AttentionConfig(d_query=4, num_heads=2, alibi=True), PLAIN),
    "causal window, mask": (WINDOW, MASK),
}


def run(model: onnx_ir.Model, inputs: Mapping[str, Any]) -> list[Any]:
    proto = onnx_ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs: list[Any] = session.run(None, inputs)
    return outputs


def assert_blocks_equal_the_whole(
    whole: onnx_ir.Model, inputs: Mapping[str, Any], *, causal: bool = False, loops: int = 1
) -> None:
    """For any number of rows; and no operator outside of the loops spans all pairs of rows."""
    before = onnx_ir.to_proto(whole).SerializeToString(deterministic=True)
    derived = in_blocks(whole, causal=causal)
    assert onnx_ir.to_proto(whole).SerializeToString(deterministic=True) == before
    operators = [node.op_type for node in derived.graph]
    assert operators.count("Loop") == loops
    assert set(operators).isdisjoint({"Attention", "Trilu", "Where", "And", "Abs"})
    (expected,) = run(whole, inputs)
    for rows in ROWS:
        (found,) = run(derived, {**inputs, "block_rows": np.array(rows)})
        assert_parity(found, expected)


def parsed(text: str) -> onnx_ir.Model:
    """A graph of opset 23 from its text."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23]> {text}')
    return onnx_ir.passes.common.ShapeInferencePass()(onnx_ir.from_proto(proto)).model


def rows_of(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(
    "case",
    [*CASES.values(), *(pytest.param(case, marks=pytest.mark.thorough) for case in FURTHER.values())],
    ids=[*CASES, *FURTHER],
)
def test_blocks_of_any_number_of_rows_give_the_result_of_the_whole(case: tuple[AttentionConfig, Any]) -> None:
    config, kind = case
    sizes = {"batch": 2, "query_length": TQ, "key_length": TK, "mask_heads": config.num_heads}
    inputs: Arrays = random_inputs(signature(attention(config), kind), sizes, np.random.default_rng(1))
    if "attention_mask" in inputs:
        inputs["attention_mask"][1, :, 3] = False
    assert_blocks_equal_the_whole(traced(config, kind), inputs, causal=config.causal)


SOFTCAP = (
    "attend (float[B, 8, T, 3] q, float[B, 2, S, 3] k, float[B, 2, S, 5] v) => (float[B, 8, T, 5] y)"
    "{ y = Attention<is_causal = %d, scale = 0.3, softcap = 2.0>(q, k, v) }"
)


@pytest.mark.parametrize("causal", [False, True], ids=["every key", "causal"])
def test_scale_softcap_and_split_heads_are_kept(causal: bool) -> None:
    inputs = {"q": rows_of(2, 8, TQ, 3), "k": 9 * rows_of(2, 2, TK, 3), "v": rows_of(2, 2, TK, 5)}
    whole = parsed(SOFTCAP % causal)
    assert_blocks_equal_the_whole(whole, inputs)
    (expected,), (capped,) = run(whole, inputs), run(parsed(SOFTCAP.replace("2.0", "0.0") % causal), inputs)
    assert np.abs(capped - expected).max() > 0.01


class Renamed(torch.nn.Module):
    """The tests' encoder, whose input is `rows`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.encoder(rows)
        return encoded


@pytest.mark.thorough
def test_a_module_of_several_attentions_has_a_loop_for_each() -> None:
    rows: TensorSpec = tensor("rows", "float32", "batch", QUERY_AXIS, 32)
    output = rows.model_copy(update={"name": "y"})
    whole = trace(Renamed(), Signature(kind=PLAIN, inputs=(rows,), outputs=(output,)))
    assert_blocks_equal_the_whole(whole, {"rows": rows_of(2, TQ, 32)}, loops=2)


HEADS = "float[B, 2, T, 3] q, float[B, 2, S, 3] k, float[B, 2, S, 3] v"
Y = "(float[B, 2, T, 3] y)"
REFUSED = {
    "no attention": ("g (float[T] x) => (float[T] y) { y = Abs(x) }", "no Attention"),
    "a cache": (
        f"g ({HEADS}, float[B, 2, P, 3] a, float[B, 2, P, 3] b) => {Y} {{ y = Attention(q, k, v, , a, b) }}",
        "a cache",
    ),
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
    "a mask of an unknown shape": (
        f"g ({HEADS}, float[T, S] m, int64[two] s) => {Y}"
        "{ n = Reshape(m, s) p = Abs(n) y = Attention(q, k, v, p) }",
        "shape is not known",
    ),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_graph_without_a_form_in_blocks_is_refused(text: str, reason: str) -> None:
    with pytest.raises(NotInBlocksError, match=reason):
        in_blocks(parsed(text), causal=False)
