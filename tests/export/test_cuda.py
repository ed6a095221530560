"""Operators that CUDA lacks, by their opset and element types."""

from pathlib import Path

import onnx
import pytest

from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import ArtifactWriter
from attention_serving.export.cuda import cuda_facts, host_operators
from attention_serving.export.precision import Precision
from attention_serving.export.signature import attention_spec
from attention_serving.export.target import Target
from attention_serving.model.presets import PRESETS, build_preset
from tests.server.samples import CROSS, SELF

GRAPHS = {
    "matrix product": ("23", "float16[N, 4] x", "float16[N, 4] y", "y = MatMul(x, x)", {}),
    "two of integers": (
        "23",
        "uint8[N, 4] x, int8[4, 4] w",
        "int32[N, 4] y",
        "t = MatMulInteger(x, w) y = Identity(t)",
        {"MatMulInteger": 1},
    ),
    "padding in bf16": ("23", "bfloat16[N] x, int64[2] p", "bfloat16[M] y", "y = Pad(x, p)", {"Pad": 1}),
    "padding": ("23", "float16[N] x, int64[2] p", "float16[M] y", "y = Pad(x, p)", {}),
    # A kernel without an end is for one version of an operator only.
    "no kernel of opset 22": ("22", "float[N] x", "float[N] y", "y = Elu(x)", {"Elu": 1}),
    "kernel of opset 6": ("21", "float[N] x", "float[N] y", "y = Elu(x)", {}),
    "inside a branch": (
        "23",
        "bool c, float[N] x",
        "float[N] y",
        "y = If(c) <then_branch = t () => (float[N] a) { a = Det(x) },"
        " else_branch = e () => (float[N] b) { b = Acos(x) }>",
        {"Acos": 1, "Det": 1},
    ),
    "of another domain": ("21", "float[N] x", "float[N] y", "y = com.microsoft.FastGelu(x)", {}),
    "replaced by a function": ("24", "float[N] x", "float[N] y", "y = Swish(x)", {}),
}


@pytest.mark.parametrize(("opset", "inputs", "outputs", "body", "operators"), GRAPHS.values(), ids=GRAPHS)
def test_what_cuda_lacks_is_named(
    opset: str, inputs: str, outputs: str, body: str, operators: dict[str, int]
) -> None:
    opsets = f'["ai.onnx": {opset}, "com.microsoft": 1]'
    text = f"<ir_version: 10, opset_import: {opsets}> g ({inputs}) => ({outputs}) {{ {body} }}"
    assert host_operators(onnx.parser.parse_model(text)) == operators


@pytest.mark.parametrize("name", [SELF, CROSS])
def test_graphs_of_artifacts_have_a_kernel_for_each_operator(artifacts: Path, name: str) -> None:
    for graph in (artifacts / name / "1").glob("*.onnx"):
        assert host_operators(onnx.load(graph, load_external_data=False)) == {}


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_a_kernel_for_each_operator_except_int8(preset: str, precision: Precision) -> None:
    """As an H100 showed for fp32, fp16 and bf16."""
    spec = attention_spec(build_preset(preset), "")
    target = Target(repository=Path(), model=ModelId(preset), replace=False)
    graphs, _, attention = ArtifactWriter(
        spec, target, precision, spec.tolerances[precision], "", str
    )._graphs()
    on_host = cuda_facts(graphs, attention)["host_operators"]
    assert isinstance(on_host, dict)
    kinds = {kind for operators in on_host.values() for kind in operators}
    assert kinds <= ({"MatMulInteger"} if precision is Precision.INT8 else set())
