"""One graph out of one module: names, axes, operators, and modules that are refused."""

import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_serving.artifact.manifest import ATTENTION_GRAPHS, GraphKind
from attention_serving.export.errors import ExportError
from attention_serving.export.graph import finish, trace
from attention_serving.export.rewrite import expand_masks, read_sizes_once
from attention_serving.export.signature import random_inputs, run_eager
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from tests.export.modules import Foreign, Shortened, Specialised, attention, exported, signature
from tests.server.samples import CROSS, SELF, TEXT, eager_module
from tests.support.eager import assert_parity

Axes = dict[str, tuple[str | int, ...]]
PLAIN, LENGTHS, MASK, WEIGHTS, BLOCKS, MASK_BLOCKS = ATTENTION_GRAPHS
OWN_INPUTS: dict[str, Axes] = {
    SELF: {"query": ("batch", "query_length", 4)},
    CROSS: {
        "query": ("batch", "query_length", 4),
        "key": ("batch", "key_length", 6),
        "value": ("batch", "key_length", 5),
    },
    TEXT: {"token_ids": ("batch", "query_length")},
}
EACH_GRAPH = pytest.mark.parametrize("kind", ATTENTION_GRAPHS)
EACH_MODEL = pytest.mark.parametrize("name", OWN_INPUTS)


def axes_of(values: Iterable[onnx.ValueInfoProto]) -> Axes:
    return {
        value.name: tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in values
    }


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The operators of a graph and of the loops in it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_nodes(attribute.g)


@EACH_MODEL
@EACH_GRAPH
def test_inputs_and_outputs_have_their_axes_by_name(artifacts: Path, name: str, kind: GraphKind) -> None:
    key_axis, config = "key_length" if name == CROSS else "query_length", eager_module(name).config
    inputs, outputs = dict(OWN_INPUTS[name]), {"context_vectors": ("batch", "query_length", config.d_out)}
    if kind is LENGTHS:
        inputs["key_lengths"] = ("batch",)
    if kind in (MASK, WEIGHTS, MASK_BLOCKS):
        inputs["attention_mask"] = ("batch", "mask_heads", "query_length", key_axis)
    if kind in (BLOCKS, MASK_BLOCKS):
        inputs["block_rows"] = ()
    graph = exported(artifacts, name, kind).graph
    assert list(axes_of(graph.input).items()) == list(inputs.items())
    weights = axes_of(graph.output)
    assert weights.pop("context_vectors") == outputs["context_vectors"]
    expected: Axes = {"attention_weights": ("batch", config.num_heads, "query_length", key_axis)}
    assert weights == (expected if kind is WEIGHTS else {})


@EACH_MODEL
@EACH_GRAPH
def test_a_graph_has_standard_operators_and_nothing_of_the_place_it_was_made_at(
    artifacts: Path, name: str, kind: GraphKind
) -> None:
    proto = exported(artifacts, name, kind)
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 23)]
    assert {node.domain for node in proto.graph.node} == {""}
    assert not proto.functions
    onnx.checker.check_model(proto, full_check=True)
    operators = [node.op_type for node in all_nodes(proto.graph)]
    # Attention is one operator unless its weights are asked for.
    fused = kind is not WEIGHTS
    assert (operators.count("Attention"), operators.count("Softmax")) == (int(fused), int(not fused))
    if name != TEXT and kind in (PLAIN, LENGTHS, MASK):  # no operator copies rows to split or join heads
        assert not {"Transpose", "Reshape"} & set(operators)
    assert not proto.graph.value_info
    for place in ("metadata_props", "doc_string", "stack_trace", ".py", "site-packages", 'File "'):
        assert place not in str(proto)


def attention_heads(proto: onnx.ModelProto) -> dict[str, int]:
    """The numbers of heads that the graph's one Attention operator states."""
    (node,) = (node for node in proto.graph.node if node.op_type == "Attention")
    return {each.name: each.i for each in node.attribute if each.name.endswith("num_heads")}


class Backwards(MultiHeadAttention):
    """Joins its heads to rows in another order than that in which they were split."""

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor | None, score_bias: Tensor | None
    ) -> Tensor:
        return super()._attend(q, k, v, may_attend, score_bias).flip(1)


# Whether the operator splits rows into heads itself.
HEADS = {
    "grouped": (AttentionConfig(d_query=8, num_heads=4, num_kv_heads=2, causal=True), True),
    "rotary": (AttentionConfig(d_query=8, num_heads=2, rotary_theta=10_000.0), False),
    "stacked": (AttentionConfig(d_query=8, num_heads=2, projections="stacked"), False),
    "backwards": (AttentionConfig(d_query=8, num_heads=2), False),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", HEADS)
def test_heads_are_split_by_the_operator_only_if_rows_are_all_they_are_made_of(name: str) -> None:
    config, merged = HEADS[name]
    module = attention(config, kind=Backwards if name == "backwards" else MultiHeadAttention)
    signed = signature(module, PLAIN)
    proto = finish(trace(module, signed), signed)
    heads = {"q_num_heads": config.num_heads, "kv_num_heads": config.num_kv_heads}
    assert attention_heads(proto) == (heads if merged else {})
    inputs = random_inputs(signed, {"batch": 4, "query_length": 9}, np.random.default_rng(0))
    (found,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, inputs)
    assert_parity(found, run_eager(module, signed, inputs)["context_vectors"])


BROADCAST = (
    "g (float[B, 2, T, 3] q, float[B, 2, S, 3] k, float[B, 2, S, 3] v, %s m) => (float[B, 2, T, 3] y)"
    "{ y = Attention(q, k, v, m) }"
)
MASKS = {
    "keys": ("bool[B, 1, 1, S]", (2, 1, 1, 5)),
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


class AsksForTheCollector(MultiHeadAttention):
    """Notes whether Python's garbage collector may run."""

    def forward(self, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        collecting.append(gc.isenabled())
        return super().forward(query, *others, **options)


collecting: list[bool] = []


def test_no_garbage_is_collected_during_an_export() -> None:
    """Python's parser, which the exporter uses, fails if another thread parses meanwhile."""
    module = attention(kind=AsksForTheCollector)
    trace(module, signature(module, PLAIN))
    assert set(collecting) == {False}
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Shortened, r"context_vectors .* expected context_vectors .*'query_length'"),
        (Foreign, r"outside the ONNX standard: com\.example\.Twice"),
        (Specialised, "branches on a length, or fixes it"),
    ],
    ids=["lost an axis", "foreign operator", "one length only"],
)
def test_a_graph_that_cannot_be_served_is_refused(kind: type[MultiHeadAttention], says: str) -> None:
    module = attention(kind=kind)
    signed = signature(module, PLAIN)
    with pytest.raises(ExportError, match=says):
        finish(trace(module, signed), signed)


@pytest.mark.parametrize(("source", "axis"), [("query", 1), ("mask", 0)])
def test_the_size_of_an_axis_is_read_from_the_first_input_that_has_it(source: str, axis: int) -> None:
    """The tracer reads it from any of them, and the bytes of an artifact must not depend on that."""
    model = onnx_ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 23]>
        agraph (float[batch, length, 8] query, bool[length] mask) => (int64[1] twice) {{
            one = Shape <start: int = {axis}, end: int = {axis + 1}> ({source})
            twice = Add (one, one)
        }}"""
    )
    read_sizes_once(model)
    shape, add = model.graph
    found = [shape.attributes[name].as_int() for name in ("start", "end")]
    assert (shape.inputs, found) == ((model.graph.inputs[0],), [1, 2])
    assert add.inputs == (shape.outputs[0], shape.outputs[0])
