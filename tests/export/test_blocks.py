"""Graphs in blocks: derived from whole graphs, equal to them for every number of rows, or refused."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch

from attention_serving.artifact.golden import Arrays, GoldenCase, golden_tensors
from attention_serving.artifact.manifest import IN_BLOCKS, GraphKind, TensorSpec
from attention_serving.export.block_mask import NotInBlocksError
from attention_serving.export.blocks import in_blocks
from attention_serving.export.graph import trace
from attention_serving.export.signature import QUERY_AXIS, Signature, random_inputs, tensor
from attention_serving.model.config import AttentionConfig
from tests.export.modules import CROSS, attention, graph, signature, traced
from tests.support.eager import assert_parity
from tests.support.modules import encoder

TQ, TK = 7, 5
# Fewer than one, one, a few, all, more than all.
ROWS = (-1, 0, 1, 2, 3, 7, 1000)
PLAIN, MASK = IN_BLOCKS
CONFIGS = {
    "grouped heads": AttentionConfig(d_query=8, num_heads=4, num_kv_heads=2),
    "cross": CROSS,
    "causal": AttentionConfig(d_query=4, num_heads=2, causal=True),
    "causal cross": AttentionConfig(d_query=4, num_heads=2, causal=True, cross=True),
    "rotary": AttentionConfig(d_query=8, num_heads=2, causal=True, rotary_theta=100.0),
    "ALiBi": AttentionConfig(d_query=4, num_heads=2, alibi=True),
    "causal ALiBi": AttentionConfig(d_query=4, num_heads=2, alibi=True, causal=True),
    "causal window": AttentionConfig(d_query=4, num_heads=2, window=3, causal=True),
}
MASKED = ("cross", "causal cross", "causal ALiBi", "causal window")
CASES = [(name, PLAIN) for name in CONFIGS] + [(name, MASK) for name in MASKED]
EACH_CASE = pytest.mark.parametrize(("name", "kind"), CASES, ids=[f"{name}-{kind}" for name, kind in CASES])


def signed(name: str, kind: GraphKind) -> Signature:
    return signature(attention(CONFIGS[name]), kind)


@cache
def whole_graph(name: str, kind: GraphKind) -> onnx_ir.Model:
    """The graph of one of the configurations, traced once."""
    return trace(attention(CONFIGS[name]), signed(name, kind))


def run(model: onnx_ir.Model, inputs: Mapping[str, Any]) -> list[Any]:
    proto = onnx_ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs: list[Any] = session.run(None, inputs)
    return outputs


def bytes_of(model: onnx_ir.Model) -> bytes:
    serialised: bytes = onnx_ir.to_proto(model).SerializeToString(deterministic=True)
    return serialised


def parsed(text: str) -> onnx_ir.Model:
    """A graph of opset 23 from its text."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23]> {text}')
    return onnx_ir.passes.common.ShapeInferencePass()(onnx_ir.from_proto(proto)).model


def rows_of(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@EACH_CASE
def test_blocks_of_any_number_of_rows_give_the_result_of_the_whole(name: str, kind: GraphKind) -> None:
    whole, config = whole_graph(name, kind), CONFIGS[name]
    sizes = {"batch": 2, "query_length": TQ, "key_length": TK, "mask_heads": config.num_heads}
    inputs: Arrays = random_inputs(signed(name, kind), sizes, np.random.default_rng(1))
    if "attention_mask" in inputs:
        inputs["attention_mask"][1, :, 3] = False
    (expected,) = run(whole, inputs)
    derived = in_blocks(whole, causal=config.causal)
    for rows in ROWS:
        (found,) = run(derived, {**inputs, "block_rows": np.array(rows)})
        assert_parity(found, expected)


@EACH_CASE
def test_no_operator_outside_of_the_loop_spans_all_pairs_of_rows(name: str, kind: GraphKind) -> None:
    derived = in_blocks(whole_graph(name, kind), causal=CONFIGS[name].causal)
    operators = [node.op_type for node in derived.graph]
    assert operators.count("Loop") == 1
    assert set(operators).isdisjoint({"Attention", "Trilu", "Where", "And", "Expand", "Abs"})


def test_the_whole_graph_is_not_modified() -> None:
    whole = traced("self", GraphKind.PLAIN)
    before = bytes_of(whole)
    in_blocks(whole, causal=False)
    assert bytes_of(whole) == before


def test_the_same_graph_gives_the_same_bytes() -> None:
    first, second = (in_blocks(traced("cross", GraphKind.MASK), causal=False) for _ in range(2))
    assert bytes_of(first) == bytes_of(second)


def test_weights_are_those_of_the_whole_graph() -> None:
    for whole, blocks in IN_BLOCKS.items():
        own, other = (
            {each.name: each.raw_data for each in graph("cross", kind).graph.initializer}
            for kind in (whole, blocks)
        )
        assert own == other


SOFTCAP = (
    "attend (float[B, 8, T, 3] q, float[B, 2, S, 3] k, float[B, 2, S, 5] v) => (float[B, 8, T, 5] y)"
    "{ y = Attention<is_causal = %d, scale = 0.3, softcap = 2.0>(q, k, v) }"
)


@pytest.mark.parametrize("causal", [False, True], ids=["every key", "causal"])
def test_scale_softcap_and_split_heads_are_kept(causal: bool) -> None:
    whole = parsed(SOFTCAP % causal)
    derived = in_blocks(whole, causal=False)
    inputs = {"q": rows_of(2, 8, TQ, 3), "k": 9 * rows_of(2, 2, TK, 3), "v": rows_of(2, 2, TK, 5)}
    (expected,) = run(whole, inputs)
    for rows in ROWS:
        assert_parity(run(derived, {**inputs, "block_rows": np.array(rows)})[0], expected)
    (capped,) = run(parsed(SOFTCAP.replace(", softcap = 2.0", "") % causal), inputs)
    assert np.abs(capped - expected).max() > 0.01


def test_a_module_of_several_attentions_has_a_loop_for_each() -> None:
    rows: TensorSpec = tensor("rows", "float32", "batch", QUERY_AXIS, 32)
    output = rows.model_copy(update={"name": "y"})
    whole = trace(Renamed(), Signature(kind=PLAIN, inputs=(rows,), outputs=(output,)))
    derived = in_blocks(whole, causal=False)
    assert [node.op_type for node in derived.graph].count("Loop") == 2
    inputs = {"rows": rows_of(2, TQ, 32)}
    (expected,) = run(whole, inputs)
    for count in ROWS:
        (found,) = run(derived, {**inputs, "block_rows": np.array(count)})
        assert_parity(found, expected)


class Renamed(torch.nn.Module):
    """The tests' encoder, whose input is `rows`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.encoder(rows)
        return encoded


HEADS = "float[B, 2, T, 3] q, float[B, 2, S, 3] k, float[B, 2, S, 3] v"
Y = "(float[B, 2, T, 3] y)"
REFUSED = {
    "no attention": ("g (float[T] x) => (float[T] y) { y = Abs(x) }", "no Attention"),
    "a cache": (
        f"g ({HEADS}, float[B, 2, P, 3] a, float[B, 2, P, 3] b) => {Y} {{ y = Attention(q, k, v, , a, b) }}",
        "a cache",
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


def test_attention_that_returns_its_scores_is_refused() -> None:
    text = f"g ({HEADS}) => (float[B, 2, T, 3] y, float[B, 2, T, S] w) {{ y, , , w = Attention(q, k, v) }}"
    with pytest.raises(NotInBlocksError, match="outputs beside the context"):
        in_blocks(parsed(text), causal=False)


def test_a_graph_of_weights_has_no_form_in_blocks() -> None:
    with pytest.raises(NotInBlocksError, match="no Attention"):
        in_blocks(traced("self", GraphKind.WEIGHTS), causal=False)


def test_golden_vectors_keep_the_shape_of_every_input() -> None:
    inputs = {"block_rows": np.array(3), "query": rows_of(2, TQ, 4)[:, ::2]}
    tensors = golden_tensors([GoldenCase(GraphKind.BLOCKS, inputs, {})])
    assert [tensors[f"blocks/0/inputs/{name}"].shape for name in inputs] == [(), (2, 4, 4)]
    assert all(tensor.flags.c_contiguous for tensor in tensors.values())
