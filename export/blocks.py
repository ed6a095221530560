"""Derives graphs that attend in blocks of query rows: memory grows with the length, not with its square.

An Attention operator holds the scores of all pairs of rows, (B, H, Tq, Tk). The derived graph replaces it by
a Loop over blocks of R query rows, which holds the scores of one block, (B, H, R, Tk). The linear layers and
all else around it stay as they are.

The exported graphs compute masks and biases of all pairs of rows. Those that a caller sends are cut. Those
that follow from positions are computed for the block alone, by the same operators.

Shapes: B batch, Tq query rows, Tk key rows, H query heads, d_k and d_v widths of one head, N blocks, R query
rows of a block, C key rows that they may attend to. "T rows of heads" are (B, T, H * d) or (B, H, T, d),
whichever the operator takes.
"""

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attention_serving.artifact.manifest import BLOCK_ROWS
from attention_serving.export.rewrite import Builder

# Query, key, value and mask; a cache of keys and values follows.
KNOWN_INPUTS = 4
TO_THE_FIRST = -(2**31)
# Operators that compute each element from those at its place.
COMPARISONS = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
ELEMENTWISE = {"Abs", "Add", "And", "Cast", "Mul", "Neg", "Not", "Or", "Sub", "Where", *COMPARISONS}
PAIR_AXES = 2  # (Tq, Tk)


class NotInBlocksError(Exception):
    """The attention of a graph cannot be computed in blocks. The message names the operator."""


def split_into_blocks(model: ir.Model, *, causal: bool) -> ir.Model:
    """A copy of a graph that attends in blocks of `block_rows` query rows, its additional scalar input.

    Args:
        model: With the shapes of its values, as exported; not modified.
        causal: Whether query row i attends to key rows 0 to i only. A block then skips all later keys.

    Raises:
        NotInBlocksError: The graph has no Attention operator, or one whose inputs, outputs or mask have no
            known form in blocks.
    """
    derived = model.clone()
    attentions = [node for node in derived.graph if node.op_type == "Attention"]
    if not attentions:
        raise NotInBlocksError("the graph has no Attention operator")
    block_rows = ir.val(BLOCK_ROWS, dtype=ir.DataType.INT64, shape=[])
    derived.graph.inputs.append(block_rows)
    for index, attention in enumerate(attentions):
        _check(attention)
        loop = _BlockLoop(attention, f"blocks.{index}", causal=causal or _is_causal(attention))
        context = loop.context(block_rows)
        ir.convenience.replace_nodes_and_values(
            derived.graph, attention, [attention], loop.outer.nodes, attention.outputs, [context]
        )
    RemoveUnusedNodesPass()(derived)
    return derived


def _check(attention: ir.Node) -> None:
    if any(attention.inputs[KNOWN_INPUTS:]) or len(attention.outputs) > 1:
        raise NotInBlocksError("Attention with a cache, or with outputs beside the context")
    if _is_causal(attention) and any(attention.inputs[KNOWN_INPUTS - 1 :]):
        raise NotInBlocksError("Attention that is causal and takes a mask")


def _is_causal(attention: ir.Node) -> bool:
    flag = attention.attributes.get("is_causal")
    return flag is not None and bool(flag.as_int())


class _BlockLoop:
    """The operators that take the place of one Attention operator.

    Blocks count from the end. The largest is then the first, and the runtime uses its memory again for the
    others: a block of causal attention has fewer keys than the block of the rows after it. The block with
    row 0 may have fewer than R rows, and is padded in front.
    """

    def __init__(self, attention: ir.Node, name: str, *, causal: bool) -> None:
        self.attention, self.name, self.causal = attention, name, causal
        self.outer = Builder(name)  # the operators around the loop
        # The axis of rows in the operator's inputs and output.
        self.axis = 1 if "q_num_heads" in attention.attributes else 2

    def context(self, block_rows: ir.Value) -> ir.Value:
        """The Tq rows of heads that the operator returns, from the largest number of rows of a block."""
        outer, (query, *_) = self.outer, _inputs(self.attention)
        length, unit = outer.size(query, self.axis), outer.integer(1)  # Tq
        # At least 1, because an integer division by zero ends the process.
        rows = outer.op("Min", outer.op("Max", block_rows, unit), length)  # R
        count = outer.op("Div", outer.op("Sub", outer.op("Add", length, rows), unit), rows)  # N
        # N times R rows of heads
        blocks = outer.op("Loop", count, outer.constant(np.True_), body=self._body(length, rows))
        padded = self._join(blocks)  # N * R rows of heads
        total = outer.op("Mul", count, rows)
        return outer.cut(padded, outer.op("Sub", total, length), total, self.axis)

    def _join(self, blocks: ir.Value) -> ir.Value:
        """All blocks as rows of heads, in the order of their rows."""
        outer, axis = self.outer, self.axis
        last, first = outer.integers([-1]), outer.integers([TO_THE_FIRST])
        ordered = outer.op("Slice", blocks, last, first, outer.integers([0]), outer.integers([-1]))
        # (B, N, R, H * d_v) or (B, H, N, R, d_v)
        neighbours = outer.op("Transpose", ordered, perm=[*range(1, axis + 1), 0, axis + 1, axis + 2])
        width = outer.op("Shape", blocks, start=axis + 2)
        shape = outer.op("Concat", outer.integers([0] * axis + [-1]), width, axis=0)
        return outer.op("Reshape", neighbours, shape)

    def _body(self, length: ir.Value, rows: ir.Value) -> ir.Graph:
        """The attention of one block: from its number to R rows of heads."""
        name = f"{self.name}.body"
        number = ir.val(f"{name}.number", dtype=ir.DataType.INT64, shape=[])
        condition = ir.val(f"{name}.condition", dtype=ir.DataType.BOOL, shape=[])
        body = Builder(name)
        end = body.op("Sub", length, body.op("Mul", number, rows))
        start = body.op("Max", body.op("Sub", end, rows), body.integer(0))
        count = body.op("Sub", end, start)
        context = self._attention(body, start, end, count)
        # CUDA has no kernel of Pad for bfloat16. Copies of the first row fill the block; they are cut away.
        places = body.op("Range", body.op("Sub", count, rows), count, body.integer(1))
        repeated = body.op("Max", places, body.integer(0))
        padded = body.op("Gather", context, repeated, axis=self.axis)
        unchanged = body.op("Identity", condition)
        return ir.Graph([number, condition], [unchanged, padded], nodes=body.nodes, name=name)

    def _attention(self, body: Builder, start: ir.Value, end: ir.Value, count: ir.Value) -> ir.Value:
        """The attention of query rows `start` to `end`, `count` rows of heads."""
        query, key, value, *masks = _inputs(self.attention)
        if self.causal:
            key, value = (body.cut(heads, body.integer(0), end, self.axis) for heads in (key, value))
        keys = body.size(key, self.axis)
        block = _Block(body=body, start=start, end=end, rows=count, keys=keys, cuts_keys=self.causal)
        masks = [block.of(mask) for mask in masks]
        attributes = dict(self.attention.attributes)
        if _is_causal(self.attention):
            masks.append(block.lower_triangle())
            attributes["is_causal"] = ir.AttrInt64("is_causal", 0)
        return body.op("Attention", body.cut(query, start, end, self.axis), key, value, *masks, **attributes)


def _inputs(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A block among all pairs of rows, and the values of masks in it, each of which is added once.

    Attributes:
        body: The operators of the block.
        start: Its first query row, an int64 scalar as those below.
        end: The query row after its last.
        rows: R.
        keys: C. Key rows count from 0.
        cuts_keys: Whether C may be less than Tk.
    """

    body: Builder
    start: ir.Value
    end: ir.Value
    rows: ir.Value
    keys: ir.Value
    cuts_keys: bool
    values: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def lower_triangle(self) -> ir.Value:
        """Boolean (R, C): whether the key row is not after the query row."""
        pairs = self.body.op("Expand", self.body.constant(np.True_), self.body.vector(self.rows, self.keys))
        return self.body.op("Trilu", pairs, self.start, upper=0)

    def of(self, value: ir.Value) -> ir.Value:
        """The block of a mask or bias (..., 1 or Tq, 1 or Tk): (..., 1 or R, 1 or C).

        Raises:
            NotInBlocksError: An operator that computes the mask has no known form for a block.
        """
        if value not in self.values:
            self.values[value] = self._make(value)
        return self.values[value]

    def _make(self, value: ir.Value) -> ir.Value:
        node = value.producer()
        if node is None or not _spans_pairs(value):
            return self._cut(value)
        if node.op_type in ELEMENTWISE:
            return self.body.op(node.op_type, *map(self.of, _inputs(node)), **node.attributes)
        if node.op_type == "Trilu":
            # Row i of the block is row `start + i` of all rows.
            pairs, *diagonal = _inputs(node)
            offset = self.body.op("Add", *diagonal, self.start) if diagonal else self.start
            return self.body.op("Trilu", self.of(pairs), offset, **node.attributes)
        if node.op_type == "Expand":
            # Other axes keep their sizes: operators broadcast those that are 1 here.
            shape = self.body.vector(self.rows, self.keys)
            return self.body.op("Expand", self.of(_inputs(node)[0]), shape)
        raise NotInBlocksError(f"a mask computed by {node.op_type}")

    def _cut(self, value: ir.Value) -> ir.Value:
        """The block of a value that exists outside of the loop."""
        axes = _axes(value)
        if len(axes) >= PAIR_AXES and axes[-2] != 1:
            value = self.body.cut(value, self.start, self.end, -2)
        if self.cuts_keys and axes and axes[-1] != 1:
            value = self.body.cut(value, self.body.integer(0), self.keys, -1)
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
