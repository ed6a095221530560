"""Masks of Attention operators that need none: what each says of a pair of rows, and what says it without.

Libraries state a mask wherever there could be one. A mask takes memory and time, and keeps a GPU's flash
attention from being used. What an element of a mask is follows from its indices, the sequence b, the query
row i and the key row j, by the operators that compute the mask. This module derives it as a formula, by
symbolic execution of these operators. Three formulas need no mask:

- True: every row may attend to every key;
- j < lengths[b]: the operator takes the lengths themselves, as `nonpad_kv_seqlen`;
- j <= i, of as many queries as keys: the operator has an attribute for it, `is_causal`.

Any other mask, and one with an operator that is not known here, stays. Source: the operators Attention-24,
GatherND-13 and Range-11 of the ONNX standard.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import onnx_ir
from numpy.typing import NDArray
from onnx_ir import DataType, Node, Value
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attention_serving.export.rewrite import LENGTHS_INPUT, MASK_INPUT, axes_of

# The version of Attention that takes lengths.
OPSET_OF_LENGTHS = 24
# Comparisons, by operator: whether the operands change places, and the comparison that results.
COMPARISONS = {
    "Less": (False, "Less"),
    "LessOrEqual": (False, "LessOrEqual"),
    "Greater": (True, "Less"),
    "GreaterOrEqual": (True, "LessOrEqual"),
}
BATCH, QUERY, KEY = -4, -2, -1


class Index(NamedTuple):
    """The index of an element along an axis, which counts from the last one, -1."""

    axis: int


class Length(NamedTuple):
    """An element of a graph's input (B,) of integers.

    Attributes:
        name: The input.
        place: Which element.
    """

    name: str
    place: "Formula"


class Condition(NamedTuple):
    """The comparison of two formulas."""

    comparison: str
    lesser: "Formula"
    greater: "Formula"


class Conditions(NamedTuple):
    """True if all conditions hold."""

    conditions: frozenset[Condition]


class Indices(NamedTuple):
    """A vector of formulas along the last axis, of a value that is used as an index."""

    formulas: tuple["Formula", ...]


Formula: TypeAlias = float | Index | Length | Conditions | Indices
EARLIER = frozenset({Condition("LessOrEqual", Index(KEY), Index(QUERY))})


class _UnknownError(Exception):
    """A value that has no formula here."""


def remove_masks(model: onnx_ir.Model) -> None:
    """Removes masks that need not be there, and the operators that compute them.

    Args:
        model: As traced, with the shapes of its values.
    """
    formulas = _Formulas()
    for attention in (node for node in model.graph if node.op_type == "Attention"):
        query, key, _, mask, *further = (*attention.inputs, None)
        pairs = [axes_of(rows)[QUERY] for rows in (query, key)]
        if mask is None or any(further) or axes_of(mask)[QUERY:] != pairs:
            continue
        with suppress(_UnknownError):
            formula = formulas.of(mask)
            if (isinstance(formula, bool) and formula) or (isinstance(formula, float) and formula == 0):
                attention.resize_inputs(MASK_INPUT)
            elif formula == Conditions(EARLIER) and pairs[0] == pairs[1]:
                attention.resize_inputs(MASK_INPUT)
                attention.attributes["is_causal"] = onnx_ir.AttrInt64("is_causal", 1)
            elif not _flag(attention, "is_causal"):
                _take_lengths(model, attention, formula)
    RemoveUnusedNodesPass()(model)


def _take_lengths(model: onnx_ir.Model, attention: Node, formula: Formula) -> None:
    """Lets an operator take lengths, if the formula of its mask says no more."""
    for value in model.graph.inputs:
        within = Condition("Less", Index(KEY), Length(str(value.name), Index(BATCH)))
        if formula == Conditions(frozenset({within})) and axes_of(value) == axes_of(attention.inputs[0])[:1]:
            attention.resize_inputs(LENGTHS_INPUT + 1)
            attention.replace_input_with(MASK_INPUT, None)
            attention.replace_input_with(LENGTHS_INPUT, value)
            model.graph.opset_imports[""] = OPSET_OF_LENGTHS


class _Formulas:
    """The formulas of the values of a graph."""

    def __init__(self) -> None:
        self._derived: dict[Value, Formula] = {}

    def of(self, value: Value | None) -> Formula:
        """What an element of a value is.

        Raises:
            _UnknownError: It does not follow from the indices in a way that is known here.
        """
        if value is None:
            raise _UnknownError
        if value not in self._derived:
            self._derived[value] = self._derive(value)
        return self._derived[value]

    def _derive(self, value: Value) -> Formula:
        node, shape = value.producer(), axes_of(value)
        if (constant := onnx_ir.convenience.get_const_tensor(value)) is not None:
            return _uniform(constant.numpy())
        if node is None and value.dtype is DataType.INT64 and len(shape) == 1:
            return Length(str(value.name), Index(-1))
        if node is None or node.op_type not in OPERATORS:
            raise _UnknownError
        formula = OPERATORS[node.op_type](node, self)
        for axis, size in enumerate(reversed(shape), start=1):
            if size == 1 and not isinstance(formula, Indices):
                formula = _substitute(formula, {-axis: 0})
        return formula


def _uniform(array: NDArray[Any]) -> Formula:
    """The number that all elements of an array are."""
    if array.size == 0 or (array != array.flat[0]).any():
        raise _UnknownError
    number: float = array.flat[0].item()
    return number


def _flag(node: Node, name: str) -> int:
    """An attribute whose default is 0."""
    return node.attributes.get_int(name, 0)


def _rank(value: Value | None) -> int:
    return len(axes_of(value))


def _range(node: Node, formulas: _Formulas) -> Formula:
    start, _, step = node.inputs
    if node.outputs[0].dtype is not DataType.INT64 or (formulas.of(start), formulas.of(step)) != (0, 1):
        raise _UnknownError
    return Index(-1)


def _first(node: Node, formulas: _Formulas) -> Formula:
    return formulas.of(node.inputs[0])


def _cast(node: Node, formulas: _Formulas) -> Formula:
    """A formula in another type. That of conditions stays one of conditions: 1 where they hold."""
    formula, data_type = _first(node, formulas), DataType(node.attributes["to"].as_int())
    if isinstance(formula, int | float):
        return bool(formula) if data_type is DataType.BOOL else formula
    if isinstance(formula, Conditions) or (isinstance(formula, Index) and data_type is DataType.INT64):
        return formula
    raise _UnknownError


def _unsqueeze(node: Node, formulas: _Formulas) -> Formula:
    value, axes = node.inputs
    numbers = None if axes is None else onnx_ir.convenience.get_const_tensor(axes)
    if numbers is None:
        raise _UnknownError
    rank = _rank(node.outputs[0])
    added = {int(axis) % rank for axis in numbers.numpy()}
    kept = [Index(axis - rank) for axis in range(rank) if axis not in added]
    return _substitute(formulas.of(value), {at - len(kept): index for at, index in enumerate(kept)})


def _concat(node: Node, formulas: _Formulas) -> Formula:
    """Numbers next to each other: indices, for `_gather`."""
    is_last = node.attributes["axis"].as_int() in (-1, _rank(node.outputs[0]) - 1)
    if not is_last or any(axes_of(value)[-1:] != [1] for value in node.inputs):
        raise _UnknownError
    return Indices(tuple(map(formulas.of, node.inputs)))


def _gather(node: Node, formulas: _Formulas) -> Formula:
    """A formula at other indices."""
    data, indices = node.inputs
    depth, vector = _rank(data), formulas.of(indices)
    if not isinstance(vector, Indices) or len(vector.formulas) != depth or _flag(node, "batch_dims"):
        raise _UnknownError
    # The last axis of the indices is not one of the output.
    moved = {-axis - 1: Index(-axis) for axis in range(1, _rank(indices))}
    places = {at - depth: _substitute(index, moved) for at, index in enumerate(vector.formulas)}
    if not all(isinstance(place, Index | int) for place in places.values()):
        raise _UnknownError
    return _substitute(formulas.of(data), places)


def _and(node: Node, formulas: _Formulas) -> Formula:
    match tuple(map(formulas.of, node.inputs)):
        case (True, other) | (other, True):
            return other
        case Conditions(first), Conditions(second):
            return Conditions(first | second)
    raise _UnknownError


def _compare(node: Node, formulas: _Formulas) -> Formula:
    """The comparison of two numbers; True if it holds for every index."""
    swapped, comparison = COMPARISONS[node.op_type]
    lesser, greater = map(formulas.of, reversed(node.inputs) if swapped else node.inputs)
    if not isinstance(lesser, int | Index | Length) or not isinstance(greater, int | Index | Length):
        raise _UnknownError
    if isinstance(lesser, int) and isinstance(greater, Index) and lesser < (comparison == "LessOrEqual"):
        return True  # indices are 0 or more
    return Conditions(frozenset({Condition(comparison, lesser, greater)}))


OPERATORS: Mapping[str, Callable[[Node, _Formulas], Formula]] = {
    "And": _and,
    "Cast": _cast,
    "Concat": _concat,
    "Expand": _first,
    "GatherND": _gather,
    "Identity": _first,
    "Range": _range,
    "Unsqueeze": _unsqueeze,
    **dict.fromkeys(COMPARISONS, _compare),
}


def _substitute(formula: Formula, places: Mapping[int, Formula]) -> Formula:
    """A formula with other formulas in place of indices."""
    match formula:
        case Index(axis):
            return places.get(axis, formula)
        case Length(name, place):
            return Length(name, _substitute(place, places))
        case Conditions(conditions):
            return Conditions(
                frozenset(
                    Condition(name, _substitute(lesser, places), _substitute(greater, places))
                    for name, lesser, greater in conditions
                )
            )
        case Indices(formulas):
            return Indices(tuple(_substitute(part, places) for part in formulas))
        case _:
            return formula
