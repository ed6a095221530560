"""Operators that ONNX Runtime's CUDA provider lacks, and would run on the host.

`cuda_kernels.json` has what its kernels take, and of which version of the runtime that is the list.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import onnx
from onnx import NodeProto, TensorProto
from onnx.defs import OpSchema
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

from attention_serving.artifact.kernels import WIDTH_MULTIPLE, AttentionOperator
from attention_serving.artifact.manifest import GraphKind

CONSTANT = "Constant"


def cuda_facts(
    graphs: Mapping[GraphKind, onnx.ModelProto], attention: Mapping[GraphKind, Sequence[AttentionOperator]]
) -> dict[str, object]:
    """What a report says about CUDA, by graph.

    Args:
        graphs: The graphs.
        attention: Their Attention operators.

    Returns:
        The version of ONNX Runtime that all of it is about; the operators that would run on the host; and how
        many Attention operators are computed by which kernel, if servers have padded keys as it needs.
    """
    on_host = {kind: host_operators(graph) for kind, graph in graphs.items()}
    kernels = {kind: Counter[str]() for kind in graphs}
    for kind, operators in attention.items():
        for operator in operators:
            kernel = operator.kernel({str(operator.key_axis): WIDTH_MULTIPLE})
            kernels[kind][kernel.name.lower()] += operator.count
    return {
        "onnxruntime": _table()["onnxruntime"],
        "host_operators": {kind: counts for kind, counts in on_host.items() if counts},
        "attention": {kind: counts for kind, counts in kernels.items() if counts},
    }


def host_operators(model: onnx.ModelProto) -> dict[str, int]:
    """The operators of a graph that have no CUDA kernel for their opset and element types, and their number.

    Args:
        model: The graph. Its weights may be in a file beside it.
    """
    (opset,) = [imported.version for imported in model.opset_import if not imported.domain]
    graph = onnx.shape_inference.infer_shapes(model).graph
    names = (node.op_type for node, types in _nodes(graph, {}) if not _has_kernel(node, types, opset))
    return dict(sorted(Counter(names).items()))


def _nodes(graph: onnx.GraphProto, outer: Mapping[str, int]) -> Iterator[tuple[NodeProto, Mapping[str, int]]]:
    """The operators of a graph and of graphs inside it, with the element types of values that are known."""
    values = (*graph.input, *graph.output, *graph.value_info)
    types = {**outer, **{value.name: value.type.tensor_type.elem_type for value in values}}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        yield node, types
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g, types)


def _has_kernel(node: NodeProto, types: Mapping[str, int], opset: int) -> bool:
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    # Constants become weights; an operator without any kernel is replaced by the operators of its function.
    if node.op_type == CONSTANT or node.op_type not in _operators_of_runtime():
        return True
    element_types = {
        (constraint, TensorProto.DataType.Name(types[name]).lower())
        for parameters, names in ((schema.inputs, node.input), (schema.outputs, node.output))
        for constraint, name in zip(_constraints(parameters, len(names)), names, strict=True)
        if types.get(name)
    }
    return any(
        all(element in kernel.get(constraint, {element}) for constraint, element in element_types)
        for first, last, kernel in _kernels().get(node.op_type, ())
        # As in `KernelRegistry::VerifyKernelDef`: a kernel without an end is for one version of the operator.
        if first == schema.since_version or (last and first <= schema.since_version <= last)
    )


def _constraints(parameters: Sequence[OpSchema.FormalParameter], count: int) -> Iterator[str]:
    """The type constraint of each of `count` values; the last parameter may stand for several."""
    return (parameters[min(at, len(parameters) - 1)].type_str for at in range(count))


@cache
def _operators_of_runtime() -> set[str]:
    return {kernel.op_name for kernel in get_all_opkernel_def()}


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(files(__package__).joinpath("cuda_kernels.json").read_text())
    return table


@cache
def _kernels() -> dict[str, list[tuple[int, int, dict[str, set[str]]]]]:
    """By operator: the first and the last opset of a kernel (0 for none), and its types by constraint."""
    table = _table()

    def read(opsets: str, constraints: Mapping[str, str]) -> tuple[int, int, dict[str, set[str]]]:
        first, dash, last = opsets.partition("-")
        types = {
            name: {*(table["any"] if text == "any" else text).split()} for name, text in constraints.items()
        }
        return int(first), int(last or (0 if dash else first)), types

    return {
        operator: [read(*kernel) for kernel in kernels.items()]
        for operator, kernels in table["kernels"].items()
    }
