"""One graph out of one module: names, axes, operators, and modules that are refused."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest

from attention_serving.artifact.manifest import ATTENTION_GRAPHS, TEXT_ATTENTION_GRAPHS, GraphKind
from attention_serving.export.errors import ExportError
from attention_serving.export.graph import finish_graph, trace
from attention_serving.export.signature import random_inputs, run_eager
from attention_serving.model.attention import MultiHeadAttention
from tests.export.modules import Foreign, Shortened, Specialised, attention, exported, signature
from tests.server.samples import CROSS, SELF, TEXT

PLAIN, LENGTHS, MASK, WEIGHTS, BLOCKS, MASK_BLOCKS = TEXT_ATTENTION_GRAPHS


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The operators of a graph and of the loops in it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_nodes(attribute.g)


@pytest.mark.parametrize(
    ("name", "kind"), [*product([SELF, CROSS], ATTENTION_GRAPHS), *product([TEXT], TEXT_ATTENTION_GRAPHS)]
)
def test_a_graph_has_standard_operators_and_nothing_of_the_place_it_was_made_at(
    artifacts: Path, name: str, kind: GraphKind
) -> None:
    proto = exported(artifacts, name, kind)
    takes_lengths = kind is LENGTHS and name != SELF  # that of a causal module needs a mask beside them
    assert [(each.domain, each.version) for each in proto.opset_import] == [("", 24 if takes_lengths else 23)]
    assert {node.domain for node in proto.graph.node} == {""}
    assert not proto.functions
    onnx.checker.check_model(proto, full_check=True)
    operators = [node.op_type for node in all_nodes(proto.graph)]
    # Attention is one operator unless its weights are asked for.
    explicit = kind in (WEIGHTS, GraphKind.CONTEXT_WEIGHTS)
    fused = not explicit and kind is not GraphKind.PROJECT
    assert (operators.count("Attention"), operators.count("Softmax")) == (int(fused), int(explicit))
    if name != TEXT and kind in (PLAIN, LENGTHS, MASK):  # no operator copies rows to split or join heads
        assert not {"Transpose", "Reshape"} & set(operators)
    assert not proto.graph.value_info
    for place in ("metadata_props", "doc_string", "stack_trace", ".py", "site-packages", 'File "'):
        assert place not in str(proto)


def test_an_output_without_the_size_of_its_axis_is_refused() -> None:
    module = attention(kind=Shortened)
    signed = signature(module, PLAIN)
    inputs = random_inputs(signed, {"batch": 1, "query_length": 7}, np.random.default_rng(0))
    with pytest.raises(ExportError, match=r"has the shape \[1, 2, 4\] .* it would be \[1, 7, 4\]"):
        run_eager(module, signed, inputs)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Foreign, r"outside the ONNX standard: com\.example\.Twice"),
        (Specialised, "fixes the size of an axis, loops over it, or branches on it"),
    ],
    ids=["foreign operator", "one length only"],
)
def test_a_graph_that_cannot_be_served_is_refused(kind: type[MultiHeadAttention], says: str) -> None:
    module = attention(kind=kind)
    signed = signature(module, PLAIN)
    with pytest.raises(ExportError, match=says):
        finish_graph(trace(module, signed).model, signed)
