"""One graph out of one module: names, axes, operators, bytes, and modules that are refused."""

import ast
import gc
import inspect
import threading
import time
from collections.abc import Iterable, Iterator

import numpy as np
import onnx
import onnxruntime
import pytest

from attention_serving.artifact.manifest import ATTENTION_GRAPHS, GraphKind
from attention_serving.export.errors import ExportError
from attention_serving.export.graph import export_graph
from attention_serving.export.signature import random_inputs, run_eager
from tests.export.modules import (
    Foreign,
    Shortened,
    Specialised,
    attention,
    graph,
    named_module,
    signature,
)
from tests.support.eager import assert_parity

Axes = dict[str, tuple[str | int, ...]]
PLAIN, LENGTHS, MASK, WEIGHTS, BLOCKS, MASK_BLOCKS = ATTENTION_GRAPHS
OWN_INPUTS: dict[str, Axes] = {
    "self": {"query": ("batch", "query_length", 4)},
    "cross": {
        "query": ("batch", "query_length", 4),
        "key": ("batch", "key_length", 5),
        "value": ("batch", "key_length", 6),
    },
    "text": {"token_ids": ("batch", "query_length")},
}
KEY_AXIS = {"self": "query_length", "cross": "key_length", "text": "query_length"}
D_OUT = {"self": 4, "cross": 8, "text": 4}
HEADS = {"self": 2, "cross": 2, "text": 1}
GRAPHS = [
    pytest.param(name, kind, id=f"{name}-{kind}")
    for name, kinds in {
        "self": ATTENTION_GRAPHS,
        "cross": ATTENTION_GRAPHS,
        "text": (PLAIN, WEIGHTS, BLOCKS),
    }.items()
    for kind in kinds
]
EACH_GRAPH = pytest.mark.parametrize(("name", "kind"), GRAPHS)


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


@EACH_GRAPH
def test_every_input_has_its_axes_by_name(name: str, kind: GraphKind) -> None:
    expected = dict(OWN_INPUTS[name])
    if kind is LENGTHS:
        expected["key_lengths"] = ("batch",)
    if kind in (MASK, WEIGHTS, MASK_BLOCKS):
        expected["attention_mask"] = ("batch", "mask_heads", "query_length", KEY_AXIS[name])
    if kind in (BLOCKS, MASK_BLOCKS):
        expected["block_rows"] = ()
    inputs = axes_of(graph(name, kind).graph.input)
    assert inputs == expected
    assert list(inputs) == list(expected)


@EACH_GRAPH
def test_every_output_has_its_axes_by_name(name: str, kind: GraphKind) -> None:
    expected: Axes = {"context_vectors": ("batch", "query_length", D_OUT[name])}
    if kind is WEIGHTS:
        expected["attention_weights"] = ("batch", HEADS[name], "query_length", KEY_AXIS[name])
    assert axes_of(graph(name, kind).graph.output) == expected


@EACH_GRAPH
def test_a_graph_uses_operators_of_the_standard_only(name: str, kind: GraphKind) -> None:
    proto = graph(name, kind)
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 23)]
    assert {node.domain for node in proto.graph.node} == {""}
    assert not proto.functions
    onnx.checker.check_model(proto, full_check=True)


@EACH_GRAPH
def test_attention_is_one_operator_unless_its_weights_are_asked_for(name: str, kind: GraphKind) -> None:
    operators = [node.op_type for node in all_nodes(graph(name, kind).graph)]
    assert operators.count("Attention") == (0 if kind is WEIGHTS else 1)
    assert operators.count("Softmax") == (1 if kind is WEIGHTS else 0)


@EACH_GRAPH
def test_a_graph_says_nothing_of_the_place_it_was_made_at(name: str, kind: GraphKind) -> None:
    proto = graph(name, kind)
    text = str(proto)
    for trace in ("metadata_props", "doc_string", "stack_trace", ".py", "site-packages", 'File "'):
        assert trace not in text
    assert not proto.graph.value_info


@EACH_GRAPH
def test_a_graph_equals_eager_pytorch_at_lengths_the_exporter_did_not_see(name: str, kind: GraphKind) -> None:
    module = named_module(name)
    signed = signature(module, kind)
    session = onnxruntime.InferenceSession(
        graph(name, kind).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for batch, query_length, key_length, mask_heads in ((1, 1, 1, 1), (4, 9, 6, 1), (1, 2, 11, HEADS[name])):
        sizes = {
            "batch": batch,
            "query_length": query_length,
            "key_length": key_length,
            "mask_heads": mask_heads,
            "block_rows": 4,
        }
        inputs = random_inputs(signed, sizes, np.random.default_rng(0))
        if "attention_mask" in inputs:
            # Else the only row of a one-row sequence would attend to nothing.
            inputs["attention_mask"][:, :, 0, 0] = True
        served = session.run(None, inputs)
        for spec, output in zip(signed.outputs, served, strict=True):
            assert_parity(output, run_eager(module, signed, inputs)[spec.name])


@pytest.mark.parametrize("kind", [PLAIN, WEIGHTS])
def test_the_same_module_gives_the_same_bytes(kind: GraphKind) -> None:
    module = named_module("self")
    again = export_graph(module, signature(module, kind))
    first = graph("self", kind).SerializeToString(deterministic=True)
    assert again.SerializeToString(deterministic=True) == first


@pytest.fixture
def parsing_thread() -> Iterator[None]:
    """Another thread that parses, and a collector that lets it run."""
    source, ended = inspect.getsource(inspect.signature), threading.Event()

    def parse() -> None:
        while not ended.wait(1e-4):
            ast.parse(source)

    def pause(*_: object) -> None:
        time.sleep(1e-3)

    gc.callbacks.append(pause)
    thread = threading.Thread(target=parse)
    thread.start()
    yield
    ended.set()
    thread.join()
    gc.callbacks.remove(pause)


@pytest.mark.usefixtures("parsing_thread")
def test_a_graph_is_exported_while_another_thread_parses() -> None:
    module = named_module("self")
    assert export_graph(module, signature(module, PLAIN)).graph.node
    assert gc.isenabled()


def test_a_graph_that_lost_an_axis_is_refused() -> None:
    module = attention(kind=Shortened)
    with pytest.raises(ExportError, match=r"context_vectors .* expected context_vectors .*'query_length'"):
        export_graph(module, signature(module, PLAIN))


def test_a_graph_with_a_foreign_operator_is_refused() -> None:
    module = attention(kind=Foreign)
    with pytest.raises(ExportError, match=r"outside the ONNX standard: com\.example\.Twice"):
        export_graph(module, signature(module, PLAIN))


def test_a_module_for_one_length_only_is_refused() -> None:
    module = attention(kind=Specialised)
    with pytest.raises(ExportError, match="branches on a length, or fixes it"):
        export_graph(module, signature(module, PLAIN))
