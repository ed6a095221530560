"""Lowers modules to half precision, and linear layers and tables of graphs to 8-bit integers.

A linear layer computes x W for rows of activations x (..., K) and weights W (K, N). Each row of x and each
column of W is divided by a scale of its own and rounded to integers from -127 to 127. Sums of their products
are exact, and the two scales turn them back into float32 (vector-wise quantisation: Dettmers et al. 2022,
"LLM.int8()", section 3.1).

Sums must be exact on x86 processors without VNNI instructions too. These add the products of two neighbouring
rows of W in 16 bits, and cut what does not fit (instruction VPMADDUBSW). With their offset, integers of x are
at most 255; so the scale of a column is such that two neighbours are at most 128 together: 255 * 128 fits.

The scale of a row of x is computed at run time, from that row alone. A result therefore depends neither on
the other sequences of a batch nor on padding, to the last bit.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass
from torch import Tensor, nn

from attention_serving.export.precision import Precision
from attention_serving.export.rewrite import Builder
from attention_serving.export.signature import output_tensors

HALF_TYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
LARGEST = 127
# Of two neighbouring weights. To round both adds 1 at most.
LARGEST_PAIR = 127
MATRIX = 2
# Elements of a table from which its memory counts.
LARGE_TABLE = 1 << 20
# Stands for the largest value of a row or column of zeros, which cannot be divided by 0.
SMALLEST_RANGE = np.float32(1e-30)
# ONNX Runtime multiplies unsigned by signed integers several times faster than signed by signed ones, so the
# integers of x are stored with this offset.
ZERO_POINT = np.uint8(128)


def lowered(module: nn.Module, precision: Precision) -> nn.Module:
    """The module to export: the given one, or a copy of it that computes in half precision."""
    dtype = HALF_TYPES.get(precision)
    return module if dtype is None else _HalfPrecision(module, dtype)


class _HalfPrecision(nn.Module):
    """Casts float32 inputs to half precision, and outputs back to float32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).to(dtype)
        self.dtype = dtype

    def forward(self, **options: Any) -> tuple[Tensor, ...]:
        """Calls the module."""
        outputs = self.module(**{name: self._cast(value) for name, value in options.items()})
        return tuple(output.float() for output in output_tensors(outputs))

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_float else value


def quantise_linear_layers(model: ir.Model) -> None:
    """Quantises every product with a constant matrix, and large tables of embeddings.

    All other operators stay as they are.
    """
    inputs = dict[ir.Value, _Rows]()
    for index, node in enumerate(list(model.graph)):
        layer = _linear_layer(node)
        if layer is None:
            continue
        builder = Builder(f"int8.{index}")
        # Layers with the same input, such as the projections of self-attention, share its integers.
        if layer.rows not in inputs:
            inputs[layer.rows] = _quantised(builder, layer.rows)
        result = layer.in_integers(builder, inputs[layer.rows])
        ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], builder.nodes, node.outputs, [result]
        )
    for index, node in enumerate(list(model.graph)):
        if (rows := _rows_of_table(f"int8.table.{index}", node)) is not None:
            ir.convenience.replace_nodes_and_values(
                model.graph, node, [node], rows.nodes, node.outputs, [rows.nodes[-1].outputs[0]]
            )
    LiftConstantsToInitializersPass()(model)
    RemoveUnusedNodesPass()(model)


def _rows_of_table(name: str, node: ir.Node) -> Builder | None:
    """The operators that look rows up in a large constant table (V, d) as integers with a scale for each row.

    None if the operator does something else.
    """
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return None
    table, places = node.inputs
    values = ir.convenience.get_const_tensor(table) if table is not None else None
    if values is None or values.dtype != ir.DataType.FLOAT or len(values.shape) != MATRIX:
        return None
    if values.size < LARGE_TABLE:
        return None
    rows = values.numpy()
    scales = (np.maximum(np.abs(rows).max(axis=1, keepdims=True), SMALLEST_RANGE) / LARGEST).astype(
        np.float32
    )
    builder = Builder(name)
    integers = builder.op("Gather", builder.constant(np.rint(rows / scales).astype(np.int8)), places)
    own = builder.op("Gather", builder.constant(scales), places)
    builder.op("Mul", builder.op("Cast", integers, to=ir.DataType.FLOAT), own)
    return builder


@dataclass(frozen=True)
class _Rows:
    """Rows of activations in integers.

    Attributes:
        integers: uint8 (..., K), with the offset ZERO_POINT.
        scales: float32 (..., 1); NaN for a row that contains NaN or infinity.
    """

    integers: ir.Value
    scales: ir.Value


@dataclass(frozen=True)
class _LinearLayer:
    """The operands of a product with constant weights.

    Attributes:
        rows: float32 (..., K).
        weights: float32 (K, N).
        bias: Is added to the product.
    """

    rows: ir.Value
    weights: NDArray[np.float32]
    bias: ir.Value | None = None

    def in_integers(self, builder: Builder, rows: _Rows) -> ir.Value:
        """The result of the layer, float32 (..., N)."""
        scales = (np.maximum(_largest_pairs(self.weights), SMALLEST_RANGE) / LARGEST_PAIR).astype(np.float32)
        integers = np.rint(self.weights / scales).astype(np.int8)
        sums = builder.op(
            "MatMulInteger", rows.integers, builder.constant(integers), builder.constant(ZERO_POINT)
        )
        by_row = builder.op("Mul", builder.op("Cast", sums, to=ir.DataType.FLOAT), rows.scales)
        product = builder.op("Mul", by_row, builder.constant(scales))
        return product if self.bias is None else builder.op("Add", product, self.bias)


def _largest_pairs(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """The largest sum of two neighbouring absolute values in each column of (K, N) weights, (N,)."""
    absolute = np.abs(weights)
    if len(absolute) % 2:
        absolute = np.pad(absolute, ((0, 1), (0, 0)))
    sums: NDArray[np.float32] = (absolute[::2] + absolute[1::2]).max(axis=0)
    return sums


def _linear_layer(node: ir.Node) -> _LinearLayer | None:
    """The layer that an operator computes; None if it computes something else."""
    if node.op_type not in {"MatMul", "Gemm"}:
        return None
    rows, weights, *bias = node.inputs
    matrix = ir.convenience.get_const_tensor(weights) if weights is not None else None
    if rows is None or matrix is None or matrix.dtype != ir.DataType.FLOAT or len(matrix.shape) != MATRIX:
        return None
    if node.op_type == "MatMul":
        return _LinearLayer(rows, matrix.numpy())
    options = {name: attribute.value for name, attribute in node.attributes.items()}
    if options.get("transA", 0) or options.get("alpha", 1.0) != 1 or options.get("beta", 1.0) != 1:
        return None
    return _LinearLayer(rows, matrix.numpy().T if options.get("transB", 0) else matrix.numpy(), *bias)


def _quantised(builder: Builder, rows: ir.Value) -> _Rows:
    last = builder.integers([-1])
    highest = builder.op("ReduceMax", rows, last)
    lowest = builder.op("ReduceMin", rows, last)
    ranges = builder.op("Max", highest, builder.op("Neg", lowest), builder.constant(SMALLEST_RANGE))
    scales = builder.op("Mul", ranges, builder.constant(np.float32(1 / LARGEST)))
    quotients = builder.op("Div", rows, scales)
    integers = builder.op(
        "QuantizeLinear", quotients, builder.constant(np.float32(1)), builder.constant(ZERO_POINT)
    )
    # Rounding turns NaN into an integer. The sum of the quotients is NaN if one of them is, otherwise finite.
    sums = builder.op("ReduceSum", quotients, last)
    nan_or_zero = builder.op("Mul", sums, builder.constant(np.float32(0)))
    return _Rows(integers, builder.op("Add", scales, nan_or_zero))
