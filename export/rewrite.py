"""Builds operators, and rewrites those of a trace: sizes of axes, masks of Attention, what surrounds it.

Shapes: B batch, T rows, Tq query rows, Tk key rows, H query heads, Hkv key and value heads, d width of one
head, d_k and d_v those of a key and of a value head.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import NDArray
from onnx_ir import Node, Value
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attention_serving.artifact.kernels import AttentionOperator

MASK_INPUT, LENGTHS_INPUT = 3, 6
ROWS_AND_HEADS_SWAPPED = (0, 2, 1, 3)
Attribute = int | float | str | Sequence[int] | onnx_ir.TensorProtocol | onnx_ir.Graph | onnx_ir.Attr


class Builder:
    """Collects operators whose outputs are named by a prefix and their number."""

    def __init__(self, prefix: str) -> None:
        self.nodes: list[Node] = []
        self._prefix = prefix

    def op(self, operator: str, *inputs: Value | None, **attributes: Attribute) -> Value:
        """Adds an operator of the ONNX standard with one output, and returns the output."""
        node = onnx_ir.node(operator, inputs, attributes)
        (output,) = node.outputs
        output.name = f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(node)
        return output

    def integer(self, value: int) -> Value:
        """A constant: int64 scalar."""
        return self.op("Constant", value_int=value)

    def integers(self, values: Sequence[int]) -> Value:
        """A constant: int64 vector."""
        return self.op("Constant", value_ints=values)

    def constant(self, value: NDArray[Any] | np.generic) -> Value:
        """A constant of any type and shape."""
        return self.op("Constant", value=onnx_ir.tensor(np.asarray(value)))

    def vector(self, *scalars: Value) -> Value:
        """The vector of int64 scalars."""
        parts = [self.op("Reshape", scalar, self.integers([1])) for scalar in scalars]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def size(self, value: Value, axis: int) -> Value:
        """The size of an axis: int64 scalar. The axis may count from the end, as -1."""
        end = {} if axis == -1 else {"end": axis + 1}
        return self.op("Squeeze", self.op("Shape", value, start=axis, **end))

    def cut(self, value: Value, start: Value, end: Value, axis: int) -> Value:
        """The part of a value from `start` to before `end` along an axis; both are int64 scalars."""
        return self.op("Slice", value, self.vector(start), self.vector(end), self.integers([axis]))


def read_sizes_once(model: onnx_ir.Model) -> None:
    """Reads the size of each symbolic axis once, at the start, from the first input that has the axis.

    Several inputs may have the same axis. From which of them the tracer reads it depends on where objects lie
    in memory, but the same module must give the same bytes.
    """
    first: dict[int | str | None, tuple[Value, int]] = {}
    for value in model.graph.inputs:
        for axis, name in enumerate(axes_of(value)):
            first.setdefault(name, (value, axis))
    reads: dict[str | None, list[Node]] = defaultdict(list)
    for node in model.graph:
        reads[_axis_read(node, model.graph.inputs)].append(node)
    sizes = [_read_once(model.graph, reads[name], *first[name]) for name in first if name in reads and name]
    if sizes:
        model.graph.insert_before(model.graph[0], sizes)


def _read_once(graph: onnx_ir.Graph, reads: Sequence[Node], value: Value, axis: int) -> Node:
    """The operator that takes the place of others, which read the size of one axis."""
    size = onnx_ir.node("Shape", [value], {"start": axis, "end": axis + 1})
    (output,), (previous, *_) = size.outputs, reads[0].outputs
    output.name, output.shape, output.type = f"size.{axes_of(value)[axis]}", previous.shape, previous.type
    for node in reads:
        onnx_ir.convenience.replace_all_uses_with(node.outputs[0], output)
        graph.remove(node, safe=True)
    return size


def _axis_read(node: Node, inputs: Sequence[Value]) -> str | None:
    """The name of the axis whose size an operator reads from an input; None for any other operator."""
    if node.op_type != "Shape" or node.inputs[0] not in inputs or "end" not in node.attributes:
        return None
    start, end = (node.attributes[name].as_int() for name in ("start", "end"))
    name = axes_of(node.inputs[0])[start]
    return name if isinstance(name, str) and end == start + 1 else None


def expand_masks(model: onnx_ir.Model) -> None:
    """Expands masks that broadcast over query or key rows to (..., Tq, Tk).

    The specification of Attention broadcasts them. ONNX Runtime fails unless both sizes are equal; it
    broadcasts the axes before them.
    """
    attentions = (node for node in model.graph if node.op_type == "Attention")
    for index, attention in enumerate(attentions):
        query, key, _, mask, *_ = (*attention.inputs, None)
        if query is None or key is None or mask is None:
            continue
        lengths = [axes_of(query)[2], axes_of(key)[2]]
        if axes_of(mask)[-2:] == lengths and None not in lengths:
            continue
        builder = Builder(f"mask.{index}")
        pairs = builder.vector(builder.size(query, 2), builder.size(key, 2))
        full = builder.op("Expand", mask, pairs)  # (..., Tq, Tk)
        full.shape, full.type = onnx_ir.Shape([*axes_of(mask)[:-2], *lengths]), mask.type
        model.graph.insert_before(attention, builder.nodes)
        attention.replace_input_with(MASK_INPUT, full)


def expand_rotary(model: onnx_ir.Model) -> None:
    """Expands the cosines and sines of rotary embeddings, (1, T, d / 2), to the batch of what they rotate.

    The exporter makes the operator of PyTorch code that broadcasts them, which ONNX Runtime does not.
    """
    rotations = (node for node in model.graph if node.op_type == "RotaryEmbedding")
    for index, rotation in enumerate(rotations):
        rotated, *angles = rotation.inputs[:3]
        builder = Builder(f"rotary.{index}")
        for place, angle in enumerate(angles, start=1):
            if rotated is None or angle is None or axes_of(angle)[:1] == axes_of(rotated)[:1]:
                continue
            shape = builder.op(
                "Concat", builder.vector(builder.size(rotated, 0)), builder.integers([1, 1]), axis=0
            )
            rotation.replace_input_with(place, builder.op("Expand", angle, shape))
        model.graph.insert_before(rotation, builder.nodes)


def merge_heads(model: onnx_ir.Model) -> None:
    """Lets Attention operators split rows into heads and join them again.

    The exporter surrounds them with operators for that, which copy four tensors and take a third of the time
    of a small module. Heads that are not simply split from rows, such as rotated ones, stay as they are.
    """
    for node in list(model.graph):
        if node.op_type == "Attention":
            _merge_heads(model.graph, node)
    RemoveUnusedNodesPass()(model)


def _merge_heads(graph: onnx_ir.Graph, attention: Node) -> None:
    query, key, value, *masks = attention.inputs  # (B, H, Tq, d_k), (B, Hkv, Tk, d_k), (B, Hkv, Tk, d_v)
    rows = [_whole_rows(heads, _before) for heads in (query, key, value)]  # (B, T, heads * d) each
    joined = _whole_rows(attention.outputs[0], _after)  # (B, Tq, H * d_v)
    if None in rows or joined is None:
        return
    counts = {"q_num_heads": axes_of(query)[1], "kv_num_heads": axes_of(key)[1]}
    merged = onnx_ir.node("Attention", [*rows, *masks], {**attention.attributes, **counts})
    # The output keeps its name. The operators around the old node become unused and are removed.
    onnx_ir.convenience.replace_nodes_and_values(graph, attention, [], [merged], [joined], merged.outputs)


def attention_operators(model: onnx_ir.Model) -> tuple[AttentionOperator, ...]:
    """The Attention operators of a graph, for its manifest; none if a width is not known.

    Args:
        model: As traced and rewritten, with the shapes of its values.
    """
    names = {axis for value in model.graph.inputs for axis in axes_of(value)}
    operators = Counter(_describe(node, names) for node in model.graph if node.op_type == "Attention")
    if None in operators:
        return ()
    return tuple(
        operator.model_copy(update={"count": count}) for operator, count in operators.items() if operator
    )


def _describe(attention: Node, names: Collection[int | str | None]) -> AttentionOperator | None:
    """One Attention operator of a graph whose inputs have axes of some names; None if a width is unknown."""
    query, key, value, mask, _, _, lengths = (*attention.inputs, *[None] * LENGTHS_INPUT)[: LENGTHS_INPUT + 1]
    counts = [attention.attributes.get_int(name, 0) for name in ("q_num_heads", "kv_num_heads")]
    heads: list[Any] = counts if any(counts) else [axes_of(rows)[1] for rows in (query, key)]
    widths: list[Any] = [axes_of(rows)[-1] for rows in (key, value)]
    data_type: Any = None if query is None or query.dtype is None else query.dtype.numpy().name
    if data_type is None or not all(isinstance(size, int) for size in (*heads, *widths)):
        return None
    axes: list[Any] = [axes_of(rows)[-2] for rows in (query, key)]
    query_axis, key_axis = (axis if axis in names or isinstance(axis, int) else None for axis in axes)
    return AttentionOperator(
        count=1,
        data_type=data_type,
        num_heads=heads[0],
        num_key_heads=heads[1],
        # Rows of heads are (B, T, H * d) if the operator splits them, and otherwise (B, H, T, d).
        key_width=widths[0] // (counts[1] or 1),
        value_width=widths[1] // (counts[1] or 1),
        query_axis=query_axis,
        key_axis=key_axis,
        has_mask=mask is not None,
        has_lengths=lengths is not None,
        causal=bool(attention.attributes.get_int("is_causal", 0)),
    )


def _whole_rows(heads: Value | None, step: Callable[[Value | None, str], Value | None]) -> Value | None:
    """The (B, T, H * d) that (B, H, T, d) is split from, or joined into; None if other operators are there.

    `step` is `_before` or `_after`.
    """
    separate = step(heads, "Transpose")  # (B, T, H, d)
    rows = step(separate, "Reshape")
    match axes_of(separate):
        case [batch, length, int(count), int(width)] if None not in (batch, length):
            return rows if axes_of(rows) == [batch, length, count * width] else None
    return None


def _before(value: Value | None, operator: str) -> Value | None:
    node = value.producer() if value is not None else None
    return node.inputs[0] if node is not None and _is(node, operator) else None


def _after(value: Value | None, operator: str) -> Value | None:
    nodes = value.consumers() if value is not None else ()
    return nodes[0].outputs[0] if len(nodes) == 1 and _is(nodes[0], operator) else None


def _is(node: Node, operator: str) -> bool:
    if node.op_type != operator:
        return False
    return operator != "Transpose" or node.attributes["perm"].as_ints() == ROWS_AND_HEADS_SWAPPED


def axes_of(value: Value | None) -> list[int | str | None]:
    """Size or name of each axis; None for an axis without either."""
    if value is None or value.shape is None:
        return []
    return [axis if isinstance(axis, int) else axis.value for axis in value.shape]
