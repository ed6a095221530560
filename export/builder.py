"""Builds the operators of a graph one by one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Attribute = int | float | str | Sequence[int] | ir.TensorProtocol | ir.Graph | ir.Attr


class Builder:
    """Collects operators whose outputs are named by a prefix and their number."""

    def __init__(self, prefix: str) -> None:
        self.nodes: list[ir.Node] = []
        self._prefix = prefix

    def op(self, operator: str, *inputs: ir.Value | None, **attributes: Attribute) -> ir.Value:
        """Adds an operator of the ONNX standard with one output, and returns the output."""
        node = ir.node(operator, inputs, attributes)
        (output,) = node.outputs
        output.name = f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(node)
        return output

    def integer(self, value: int) -> ir.Value:
        """A constant: int64 scalar."""
        return self.op("Constant", value_int=value)

    def integers(self, values: Sequence[int]) -> ir.Value:
        """A constant: int64 vector."""
        return self.op("Constant", value_ints=values)

    def constant(self, value: NDArray[Any] | np.generic) -> ir.Value:
        """A constant of any type and shape."""
        return self.op("Constant", value=ir.tensor(np.asarray(value)))

    def true(self) -> ir.Value:
        """A constant: bool scalar."""
        return self.constant(np.True_)

    def vector(self, *scalars: ir.Value) -> ir.Value:
        """The vector of int64 scalars."""
        parts = [self.op("Reshape", scalar, self.integers([1])) for scalar in scalars]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """The size of an axis: int64 scalar. The axis may count from the end, as -1."""
        end = {} if axis == -1 else {"end": axis + 1}
        return self.op("Squeeze", self.op("Shape", value, start=axis, **end))

    def cut(self, value: ir.Value, start: ir.Value, end: ir.Value, axis: int) -> ir.Value:
        """The part of a value from `start` to before `end` along an axis; both are int64 scalars."""
        return self.op("Slice", value, self.vector(start), self.vector(end), self.integers([axis]))
