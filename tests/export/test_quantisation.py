"""Linear layers in integers: which are replaced, how far they are off, and rows of unusual numbers."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attention_serving.artifact.manifest import GraphKind
from attention_serving.export import export_module
from attention_serving.export.quantisation import quantise_linear_layers
from attention_serving.export.rewrite import Attribute, Builder

Array = NDArray[np.float32]
K, N = 24, 10


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def operator(
    name: str, *constants: Array, rank: int = 2, width: int = K, **attributes: Attribute
) -> ir.Model:
    """A graph of one operator with input x (..., width) and output y (..., N)."""
    axes = [f"axis_{axis}" for axis in range(rank - 1)]
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[*axes, width])
    builder = Builder("test")
    y = builder.op(name, x, *(builder.constant(constant) for constant in constants), **attributes)
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape([*axes, N])
    graph = ir.Graph([x], [y], nodes=builder.nodes, opset_imports={"": 23}, name="test")
    return ir.Model(graph, ir_version=10)


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def run(model: ir.Model, x: Array) -> Array:
    proto: onnx.ModelProto = ir.to_proto(model)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    return np.asarray(y)


def pairs(weights: NDArray[Any]) -> NDArray[Any]:
    """The largest sum of two neighbouring absolute values of each column."""
    return np.asarray(np.abs(weights).reshape(-1, 2, weights.shape[1]).sum(1).max(0))


def bound(x: Array, weights: Array) -> Array:
    """The largest error that rounding to integers can cause: half a step for each factor of each product."""
    step_x = np.abs(x).max(-1, keepdims=True) / 127 / 2
    step_w = pairs(weights) / 127 / 2
    errors = step_x * np.abs(weights).sum(0) + np.abs(x).sum(-1, keepdims=True) * step_w + K * step_x * step_w
    return np.asarray(errors * 1.01 + 1e-6)


LAYERS = {
    "product of a batch": (operator("MatMul", normal(K, N), rank=3), (2, 5, K)),
    "Gemm with transposed weights and bias": (
        operator("Gemm", normal(K, N).T.copy(), normal(N, seed=1), transB=1),
        (5, K),
    ),
}


@pytest.mark.parametrize("scale", [1e-3, 1e6])
@pytest.mark.parametrize(("model", "shape"), LAYERS.values(), ids=LAYERS)
def test_a_layer_is_off_by_rounding_only(model: ir.Model, shape: tuple[int, ...], scale: float) -> None:
    quantised = model.clone()
    quantise_linear_layers(quantised)
    assert operators(quantised)["MatMulInteger"] == 1
    assert not {"MatMul", "Gemm"} & operators(quantised).keys()
    x = normal(*shape, seed=2) * np.float32(scale)
    expected, found = run(model, x), run(quantised, x)
    assert (np.abs(found - expected) <= bound(x, normal(K, N))).all()
    assert not np.array_equal(found, expected)


@pytest.mark.parametrize("is_sign", [True, False])
def test_sums_are_exact_on_every_processor(is_sign: bool) -> None:
    """Those without VNNI instructions add the products of two neighbouring weights in 16 bits."""
    weights = normal(K, N)
    if is_sign:
        weights = np.sign(weights)
    model = operator("MatMul", weights)
    quantise_linear_layers(model)
    constants = [each.const_value.numpy() for each in model.graph.initializers.values() if each.const_value]
    (integers,) = [each for each in constants if each.dtype == np.int8]
    assert 255 * pairs(integers.astype(int)).max() < 2**15
    for x in (np.sign(weights).T.copy(), np.ones((1, K), np.float32), -np.ones((1, K), np.float32)):
        assert (np.abs(run(model, x) - x @ weights) <= bound(x, weights)).all()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_row_with_a_value_that_is_not_finite_gives_nan_and_leaves_the_others(value: float) -> None:
    """Also where a column of weights is zeros."""
    model = operator("MatMul", np.asarray(normal(K, N) * (np.arange(N) != 3), np.float32))
    quantise_linear_layers(model)
    x = normal(3, K)
    expected = run(model, x)
    x[1, 4] = value
    found = run(model, x)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2]], expected[[0, 2]])
    assert not found[[0, 2], 3].any()


class MaskedMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask[..., None].float()
        score: Tensor = self.head(self.norm((x * weights).sum(1) / weights.sum(1)))
        return score


def test_rows_times_a_mask_of_numbers_are_lowered(tmp_path: Path) -> None:
    example = {"x": torch.randn(2, 3, 8), "attention_mask": torch.ones(2, 3, dtype=torch.int64)}
    _, manifest = export_module(
        MaskedMean(), example, out=tmp_path, name="m", precision="fp16", max_length=16
    )
    assert (manifest.precision, set(manifest.graphs)) == ("fp16", {GraphKind.PLAIN, GraphKind.LENGTHS})
