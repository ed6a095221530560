"""One graph out of one module: names, axes, operators, and modules that are refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest

from attention_serving.artifact.manifest import ATTENTION_GRAPHS, GraphKind
from attention_serving.export.errors import ExportError
from attention_serving.export.graph import finish, trace
from attention_serving.export.rewrite import read_sizes_once
from attention_serving.export.signature import random_inputs, run_eager
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from tests.export.modules import Foreign, Shortened, Specialised, attention, exported, signature
from tests.server.samples import CROSS, SELF, TEXT
from tests.support.eager import assert_parity

PLAIN, LENGTHS, MASK, WEIGHTS, BLOCKS, MASK_BLOCKS = ATTENTION_GRAPHS


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The operators of a graph and of the loops in it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_nodes(attribute.g)


@pytest.mark.parametrize("name", [SELF, CROSS, TEXT])
@pytest.mark.parametrize("kind", ATTENTION_GRAPHS)
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


# Whether the operator splits rows into heads itself.
HEADS: dict[str, tuple[dict[str, Any], bool]] = {
    "grouped": ({"num_heads": 4, "num_kv_heads": 2, "causal": True}, True),
    "rotary": ({"num_heads": 2, "rotary_theta": 10_000.0}, False),
    "stacked": ({"num_heads": 2, "projections": "stacked"}, False),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "merged"), HEADS.values(), ids=HEADS)
def test_heads_are_split_by_the_operator_only_if_rows_are_all_they_are_made_of(
    options: dict[str, Any], merged: bool
) -> None:
    module = attention(AttentionConfig(d_query=8, **options))
    signed = signature(module, PLAIN)
    proto = finish(trace(module, signed), signed)
    (node,) = (node for node in proto.graph.node if node.op_type == "Attention")
    assert any(each.name == "kv_num_heads" for each in node.attribute) == merged
    inputs = random_inputs(signed, {"batch": 4, "query_length": 9}, np.random.default_rng(0))
    (found,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, inputs)
    assert_parity(found, run_eager(module, signed, inputs)["context_vectors"])


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
