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
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from attention_serving.export.precision import Precision
from attention_serving.export.rewrite import Builder
from attention_serving.export.signature import output_tensors

HALF_TYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
# Operators whose factors have one type.
PRODUCTS = {
    F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm,
    torch.einsum, F.scaled_dot_product_attention, torch.conv1d, torch.conv2d, F.layer_norm, F.rms_norm,
    F.group_norm, F.batch_norm,
}  # fmt: skip
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


def in_precision(module: nn.Module, precision: Precision) -> nn.Module:
    """The module to export: the given one, or a copy of it that computes in half precision."""
    dtype = HALF_TYPES.get(precision)
    return module if dtype is None else _HalfPrecision(module, dtype)


class _CastProducts(TorchFunctionMode):
    """Casts the float32 factors of products with half precision, such as rows times `mask.float()`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator."""
        kwargs = kwargs or {}
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if func in PRODUCTS and any(tensor.dtype is self._dtype for tensor in tensors):
            args, kwargs = tree_map(self._cast, (args, kwargs))
        return func(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, Tensor) and value.dtype is torch.float32 else value


class _HalfPrecision(nn.Module):
    """Casts float32 inputs to half precision, and real outputs back to float32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).to(dtype)
        self.dtype = dtype

    def forward(self, **options: Any) -> tuple[Tensor, ...]:
        """Calls the module."""
        with _CastProducts(self.dtype):
            outputs = self.module(**{name: self._cast(value) for name, value in options.items()})
        return output_tensors(outputs)

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_float else value


def quantise_linear_layers(model: ir.Model) -> None:
    """Quantises every product with a constant matrix, and large tables of embeddings.

    All other operators stay as they are.
    """
    rows = dict[ir.Value | None, tuple[ir.Value, ir.Value]]()
    for index, node in enumerate(list(model.graph)):
        weights = _weights(node)
        if weights is None:
            continue
        builder = Builder(f"int8.{index}")
        inputs, _, *bias = node.inputs
        # Layers with the same input, such as the projections of self-attention, share its integers.
        if inputs not in rows:
            rows[inputs] = _quantise_rows(builder, inputs)
        result = _multiply(builder, *rows[inputs], weights)
        if any(bias):
            result = builder.op("Add", result, *bias)
        _replace(model.graph, node, builder, result)
    for index, node in enumerate(list(model.graph)):
        if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
            table = _matrix(node.inputs[0])
            if table is not None and table.size >= LARGE_TABLE:
                builder = Builder(f"int8.table.{index}")
                _replace(model.graph, node, builder, _look_up(builder, table, node.inputs[1]))
    LiftConstantsToInitializersPass()(model)
    RemoveUnusedNodesPass()(model)


def _replace(graph: ir.Graph, node: ir.Node, builder: Builder, result: ir.Value) -> None:
    ir.convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, node.outputs, [result])


def _matrix(value: ir.Value | None) -> NDArray[np.float32] | None:
    """The elements of a constant float32 matrix; None for any other value."""
    constant = ir.convenience.get_const_tensor(value) if value is not None else None
    if constant is None or constant.dtype != ir.DataType.FLOAT or len(constant.shape) != MATRIX:
        return None
    return constant.numpy()


def _look_up(builder: Builder, table: NDArray[np.float32], places: ir.Value | None) -> ir.Value:
    """Rows of a table (V, d), looked up as integers with a scale for each row."""
    integers, scales = _quantise(table, np.abs(table).max(axis=1, keepdims=True), LARGEST)
    rows = builder.op("Gather", builder.constant(integers), places)
    scales_of_rows = builder.op("Gather", builder.constant(scales), places)
    return builder.op("Mul", builder.op("Cast", rows, to=ir.DataType.FLOAT), scales_of_rows)


def _multiply(
    builder: Builder, rows: ir.Value, row_scales: ir.Value, weights: NDArray[np.float32]
) -> ir.Value:
    """The product of quantised rows with (K, N) weights, float32 (..., N)."""
    integers, scales = _quantise(weights, _largest_pairs(weights), LARGEST_PAIR)
    sums = builder.op("MatMulInteger", rows, builder.constant(integers), builder.constant(ZERO_POINT))
    by_row = builder.op("Mul", builder.op("Cast", sums, to=ir.DataType.FLOAT), row_scales)
    return builder.op("Mul", by_row, builder.constant(scales))


def _quantise(
    values: NDArray[np.float32], ranges: NDArray[np.float32], largest: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers, and the scales that turn `largest` into the ranges, which broadcast to the values."""
    scales = (np.maximum(ranges, SMALLEST_RANGE) / largest).astype(np.float32)
    return np.rint(values / scales).astype(np.int8), scales


def _largest_pairs(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """The largest sum of two neighbouring absolute values in each column of (K, N) weights, (N,)."""
    absolute = np.abs(weights)
    if len(absolute) % 2:
        absolute = np.pad(absolute, ((0, 1), (0, 0)))
    sums: NDArray[np.float32] = (absolute[::2] + absolute[1::2]).max(axis=0)
    return sums


def _weights(node: ir.Node) -> NDArray[np.float32] | None:
    """The constant (K, N) weights of a linear layer; None if the operator computes something else."""
    if node.op_type not in {"MatMul", "Gemm"}:
        return None
    options = {name: attribute.value for name, attribute in node.attributes.items()}
    if options.get("transA", 0) or options.get("alpha", 1.0) != 1 or options.get("beta", 1.0) != 1:
        return None
    weights = _matrix(node.inputs[1])
    return weights.T if weights is not None and options.get("transB", 0) else weights


def _quantise_rows(builder: Builder, rows: ir.Value | None) -> tuple[ir.Value, ir.Value]:
    """The integers of rows (..., K), uint8 with the offset ZERO_POINT, and their scales, float32 (..., 1).

    The scale of a row that contains NaN or infinity is NaN.
    """
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
    return integers, builder.op("Add", scales, nan_or_zero)
