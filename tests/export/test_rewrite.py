"""Attention operators over whole rows, where rows are all that heads are cut from."""

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_serving.artifact.manifest import GraphKind
from attention_serving.export.graph import export_graph
from attention_serving.export.rewrite import expand_masks
from attention_serving.export.signature import random_inputs, run_eager
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from tests.export.modules import attention, graph, signature, traced
from tests.support.eager import assert_parity

MERGED = {
    "multi-head": AttentionConfig(d_query=8, num_heads=2),
    "grouped": AttentionConfig(d_query=8, num_heads=4, num_kv_heads=2, causal=True),
    "fused": AttentionConfig(d_query=8, num_heads=2, projections="fused", qkv_bias=True),
    "without projections": AttentionConfig(d_query=8, num_heads=2, projections="none", out_proj=False),
}
KEPT = {
    "rotary": AttentionConfig(d_query=8, num_heads=2, rotary_theta=10_000.0),
    "stacked": AttentionConfig(d_query=8, num_heads=2, projections="stacked"),
}


class Backwards(MultiHeadAttention):
    """Joins its heads to rows of another order than that in which they were cut."""

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor | None, score_bias: Tensor | None
    ) -> Tensor:
        return super()._attend(q, k, v, may_attend, score_bias).flip(1)


def attention_heads(proto: onnx.ModelProto) -> dict[str, int]:
    """The numbers of heads that the graph's one Attention operator states."""
    (node,) = (node for node in proto.graph.node if node.op_type == "Attention")
    return {
        attribute.name: attribute.i for attribute in node.attribute if attribute.name.endswith("num_heads")
    }


def assert_equals_eager(module: MultiHeadAttention, kind: GraphKind, proto: onnx.ModelProto) -> None:
    """The graph equals eager PyTorch at lengths that its export did not use."""
    signed = signature(module, kind)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch, length in ((1, 1), (4, 9)):
        sizes = {"batch": batch, "query_length": length, "mask_heads": 1}
        inputs = random_inputs(signed, sizes, np.random.default_rng(0))
        (served,) = session.run(None, inputs)
        assert_parity(served, run_eager(module, signed, inputs)["context_vectors"])


@pytest.mark.parametrize("kind", [GraphKind.PLAIN, GraphKind.LENGTHS, GraphKind.MASK])
@pytest.mark.parametrize("name", ["self", "cross"])
def test_no_operator_copies_rows_to_cut_or_join_them(name: str, kind: GraphKind) -> None:
    proto = graph(name, kind)
    assert {node.op_type for node in proto.graph.node}.isdisjoint({"Transpose", "Reshape"})
    assert attention_heads(proto) == {"q_num_heads": 2, "kv_num_heads": 2}


@pytest.mark.parametrize("kind", [GraphKind.PLAIN, GraphKind.LENGTHS, GraphKind.MASK])
@pytest.mark.parametrize("config", MERGED.values(), ids=MERGED)
def test_attention_over_whole_rows_equals_eager_pytorch(config: AttentionConfig, kind: GraphKind) -> None:
    module = attention(config)
    proto = export_graph(module, signature(module, kind))
    heads = {"q_num_heads": config.num_heads, "kv_num_heads": config.num_kv_heads}
    assert attention_heads(proto) == heads
    assert_equals_eager(module, kind, proto)


@pytest.mark.parametrize("config", KEPT.values(), ids=KEPT)
def test_heads_that_are_not_cut_from_rows_stay(config: AttentionConfig) -> None:
    module = attention(config)
    assert attention_heads(export_graph(module, signature(module, GraphKind.PLAIN))) == {}


def test_heads_that_are_not_joined_as_they_were_cut_stay() -> None:
    module = attention(kind=Backwards)
    proto = export_graph(module, signature(module, GraphKind.PLAIN))
    assert attention_heads(proto) == {}
    assert_equals_eager(module, GraphKind.PLAIN, proto)


BROADCAST = (
    "g (float[B, 2, T, 3] q, float[B, 2, S, 3] k, float[B, 2, S, 3] v, %s m) => (float[B, 2, T, 3] y)"
    "{ y = Attention(q, k, v, m) }"
)
MASKS = {
    "keys": ("bool[B, 1, 1, S]", (2, 1, 1, 5)),
    "keys of every batch": ("bool[1, S]", (1, 5)),
    "rows": ("float[1, 1, T, 1]", (1, 1, 7, 1)),
    "pairs of every batch": ("float[1, 2, T, S]", (1, 2, 7, 5)),
    "pairs": ("bool[T, S]", (7, 5)),
}


@pytest.mark.parametrize(("text", "shape"), MASKS.values(), ids=MASKS)
def test_masks_that_broadcast_are_expanded_and_others_are_not(text: str, shape: tuple[int, ...]) -> None:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23]> {BROADCAST % text}')
    model = onnx_ir.passes.common.ShapeInferencePass()(onnx_ir.from_proto(proto)).model
    before = onnx_ir.to_proto(model).SerializeToString(deterministic=True)
    expand_masks(model)
    after = onnx_ir.to_proto(model).SerializeToString(deterministic=True)
    assert (before == after) == (shape[-2:] == (7, 5))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, rows, 3), np.float32) for rows in (7, 5, 5))
    mask = rng.random(shape) < 0.7 if "bool" in text else rng.standard_normal(shape, np.float32)
    (found,) = onnxruntime.InferenceSession(after).run(None, {"q": q, "k": k, "v": v, "m": mask})
    query, key, value, attn_mask = (torch.from_numpy(array) for array in (q, k, v, mask))
    assert_parity(found, F.scaled_dot_product_attention(query, key, value, attn_mask).numpy())


def test_a_graph_without_masks_does_not_change() -> None:
    model = traced("self", GraphKind.PLAIN).clone()
    before = onnx_ir.to_proto(model).SerializeToString(deterministic=True)
    expand_masks(model)
    assert onnx_ir.to_proto(model).SerializeToString(deterministic=True) == before
