"""Computes the part of a mask or bias that belongs to one block of query rows.

The exported graphs compute masks and biases of all pairs of rows. Those that a caller sends are cut. Those
that follow from positions are computed for the block alone, by the same operators.

Shapes: Tq query rows, Tk key rows, R query rows of the block, C key rows that they may attend to.
"""

from dataclasses import dataclass

import onnx_ir as ir

from attention_serving.export.builder import Builder

# Operators that compute each element from those at its place.
ELEMENTWISE = frozenset({"Abs", "Add", "And", "Cast", "Mul", "Neg", "Not", "Or", "Sub", "Where"})
PAIR_AXES = 2  # (Tq, Tk)


class NotInBlocksError(Exception):
    """The attention of a graph cannot be computed in blocks. The message names the operator."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """The place of a block among all pairs of rows: int64 scalars.

    Attributes:
        start: Its first query row.
        end: The query row after its last.
        rows: R.
        keys: C. Key rows count from 0.
        cuts_keys: Whether C may be less than Tk.
    """

    start: ir.Value
    end: ir.Value
    rows: ir.Value
    keys: ir.Value
    cuts_keys: bool


def lower_triangle(body: Builder, block: Block) -> ir.Value:
    """Boolean (R, C): whether the key row is not after the query row."""
    allowed = body.true()
    pairs = body.op("Expand", allowed, body.vector(block.rows, block.keys))
    return body.op("Trilu", pairs, block.start, upper=0)


def block_of_mask(body: Builder, mask: ir.Value, block: Block) -> ir.Value:
    """The block of a mask or bias (..., 1 or Tq, 1 or Tk): (..., 1 or R, 1 or C).

    Raises:
        NotInBlocksError: An operator that computes the mask has no known form for a block.
    """
    return _Blocks(body, block).of(mask)


class _Blocks:
    """Blocks of the values that a mask is computed from; each is added to the body once."""

    def __init__(self, body: Builder, block: Block) -> None:
        self._body = body
        self._block = block
        self._made: dict[ir.Value, ir.Value] = {}

    def of(self, value: ir.Value) -> ir.Value:
        """The block of a value."""
        if value not in self._made:
            self._made[value] = self._make(value)
        return self._made[value]

    def _make(self, value: ir.Value) -> ir.Value:
        node = value.producer()
        if node is None or not _spans_pairs(value):
            return self._cut(value)
        if node.op_type in ELEMENTWISE:
            return self._body.op(node.op_type, *map(self.of, _given(node)), **node.attributes)
        if node.op_type == "Trilu":
            # Row i of the block is row `start + i` of all rows.
            pairs, *diagonal = _given(node)
            offset = self._body.op("Add", *diagonal, self._block.start) if diagonal else self._block.start
            return self._body.op("Trilu", self.of(pairs), offset, **node.attributes)
        if node.op_type == "Expand":
            # Other axes keep their sizes: operators broadcast those that are 1 here.
            shape = self._body.vector(self._block.rows, self._block.keys)
            return self._body.op("Expand", self.of(_given(node)[0]), shape)
        raise NotInBlocksError(f"a mask computed by {node.op_type}")

    def _cut(self, value: ir.Value) -> ir.Value:
        """The block of a value that exists outside of the loop."""
        axes, block = _axes(value), self._block
        if len(axes) >= PAIR_AXES and axes[-2] != 1:
            value = self._body.cut(value, block.start, block.end, -2)
        if block.cuts_keys and axes and axes[-1] != 1:
            value = self._body.cut(value, self._body.integer(0), block.keys, -1)
        return value


def _spans_pairs(value: ir.Value) -> bool:
    """Whether the value has an element for each pair of rows."""
    return 1 not in _axes(value)[-PAIR_AXES:] and len(_axes(value)) >= PAIR_AXES


def _axes(value: ir.Value) -> list[int | ir.SymbolicDim]:
    """The sizes of the value's axes.

    Raises:
        NotInBlocksError: They are not known.
    """
    if value.shape is None:
        raise NotInBlocksError(f"a mask computed from {value.name}, whose shape is not known")
    return list(value.shape)


def _given(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]
