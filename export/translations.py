"""Operators that the exporter lacks, most of them on complex tensors, which have a last axis of 2 in ONNX."""

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any

import onnx_ir
import torch
from onnxscript.onnx_opset import opset18
from torch.onnx._internal.exporter._registration import ONNXRegistry

aten = torch.ops.aten
op: Any = opset18  # its types know no values of a trace
# They are the same for the real and the imaginary part.
BY_PARTS = (
    aten.unsqueeze.default, aten.expand.default, aten.select.int, aten.index.Tensor, aten.repeat.default,
    aten.squeeze.dims, aten.index_select.default, aten.gather.default, aten.alias.default,
)  # fmt: skip

SPLITS = (aten.split_with_sizes.default, aten.split.Tensor)


def add_operators(registry: ONNXRegistry) -> None:
    """Adds them to the exporter's table of operators."""
    for targets, form in ((BY_PARTS, _by_parts), (SPLITS, _by_axis)):
        for target in targets:
            real = next((entry for entry in registry.get_decomps(target) if not entry.is_complex), None)
            if real is not None:
                registry.register_op(target, form(real.onnx_function), is_complex=True)
    registry.register_op(aten.exp.default, _exp, is_complex=True)
    registry.register_op(aten.mul.Scalar, _scale, is_complex=True)
    registry.register_op(aten.sort.stable, _stable(registry.get_decomps(aten.sort.default)[0].onnx_function))
    registry.register_op(operator.floordiv, _floor_division)
    convert = torch.ops.prims.convert_element_type.default
    registry.register_op(convert, _conversion(registry.get_decomps(convert)[0].onnx_function))


def _floor_division(self: Any, other: Any) -> onnx_ir.Value:
    """A size divided by another one. ONNX rounds -(-T // 4) towards zero; its remainder is that of Python."""
    quotient: onnx_ir.Value = op.Div(op.Sub(self, op.Mod(self, other)), other)
    return quotient


def _by_parts(function: Any) -> Callable[..., Any]:
    @wraps(getattr(function, "func", function))
    def compute(self: Any, *args: Any, **options: Any) -> Any:
        return _join(*(function(part, *args, **options) for part in _parts(self)))

    return compute


def _by_axis(function: Any) -> Callable[..., Any]:
    @wraps(getattr(function, "func", function))
    def compute(self: Any, sizes: Any, dim: int = 0) -> Any:
        return function(self, sizes, dim % (len(self.shape) - 1))

    return compute


def _parts(value: onnx_ir.Value) -> list[onnx_ir.Value]:
    """The real and the imaginary part of a complex tensor."""
    parts: list[onnx_ir.Value] = [op.Squeeze(op.Slice(value, [at], [at + 1], [-1]), [-1]) for at in range(2)]
    for part in parts:
        part.type = value.type
        if value.shape is not None:
            part.shape = onnx_ir.Shape(list(value.shape)[:-1])
    return parts


def _join(real: onnx_ir.Value, imaginary: onnx_ir.Value) -> onnx_ir.Value:
    pair: onnx_ir.Value = op.Concat(op.Unsqueeze(real, [-1]), op.Unsqueeze(imaginary, [-1]), axis=-1)
    return pair


def _exp(self: onnx_ir.Value) -> onnx_ir.Value:
    real, imaginary = _parts(self)
    size = op.Exp(real)
    return _join(op.Mul(size, op.Cos(imaginary)), op.Mul(size, op.Sin(imaginary)))


def _scale(self: onnx_ir.Value, other: Any) -> onnx_ir.Value:
    """The product with a number, which may be complex."""
    real, imaginary = _parts(self)
    factors = [op.CastLike(op.Constant(value_float=part), self) for part in (other.real, other.imag)]
    return _join(
        op.Sub(op.Mul(real, factors[0]), op.Mul(imaginary, factors[1])),
        op.Add(op.Mul(real, factors[1]), op.Mul(imaginary, factors[0])),
    )


def _stable(function: Any) -> Callable[..., Any]:
    """A stable sort. ONNX sorts by TopK, which takes equal values in their order."""

    def sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:  # noqa: ARG001, FBT001, FBT002
        return function(self, dim, descending)

    return sort


def _conversion(function: Any) -> Callable[..., Any]:
    """Conversion of a real tensor, which may be to a complex one."""

    def convert(a: Any, dtype: int) -> Any:
        kind = onnx_ir.DataType(dtype)
        if kind is not onnx_ir.DataType.COMPLEX64:
            return function(a, dtype)
        real = op.Cast(a, to=onnx_ir.DataType.FLOAT)
        return _join(real, op.ConstantOfShape(op.Shape(real)))

    return convert
