"""Exports a module as one ONNX graph with named symbolic axes and standard operators."""

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_ir
import torch
from torch import nn

from artifact.manifest import BATCH_AXIS
from export.errors import ExportError
from export.rewrite import merge_heads
from export.signature import MASK_HEADS_AXIS, Signature, SignedModule

OPSET = 23
# Sizes at export: of the batch, and of the sequence axes in their order. They differ from each other, so
# that two confused axes are noticed, and from 1, which the tracer takes for a constant.
EXAMPLE_BATCH, EXAMPLE_LENGTHS = 2, (3, 5, 11, 17)


def export_graph(module: nn.Module, signature: Signature) -> onnx.ModelProto:
    """Exports the graph of one signature.

    Raises:
        ExportError: The module cannot be traced, or its graph lost a symbolic axis or uses an operator
            outside the ONNX standard.
    """
    return finish(trace(module, signature), signature)


def trace(module: nn.Module, signature: Signature) -> onnx_ir.Model:
    """Traces the graph of one signature, with the shapes of its values.

    Raises:
        ExportError: The module cannot be traced.
    """
    try:
        program = _export(SignedModule(module, signature), signature)
    except torch.onnx.OnnxExporterError as error:
        axes = ", ".join(f"{spec.name} {spec.axes}" for spec in signature.inputs)
        raise ExportError(f"graph {signature.kind} over {axes}: {error.__cause__ or error}") from error
    for value, spec in zip(program.model.graph.inputs, signature.inputs, strict=True):
        # Operators broadcast a mask of one head, and take one of H heads as well: the axis traced as 1
        # becomes symbolic. The parity report covers both sizes.
        if MASK_HEADS_AXIS in spec.axes:
            value.shape = onnx_ir.Shape(spec.axes)
    _rename_inner_values(program.model)
    merge_heads(program.model)
    return program.model


def _rename_inner_values(model: onnx_ir.Model) -> None:
    """Renames values that have the name of an input or output: the tracer names values after operators."""
    outer = {*model.graph.inputs, *model.graph.outputs}
    names = {value.name for value in outer}
    inner = (value for node in model.graph for value in node.outputs if value not in outer)
    for index, value in enumerate(inner):
        if value.name in names:
            value.name = f"{value.name}.{index}"


def finish(model: onnx_ir.Model, signature: Signature) -> onnx.ModelProto:
    """The graph to store: without debugging data, and checked.

    Raises:
        ExportError: The graph lost a symbolic axis, or uses an operator outside the ONNX standard.
    """
    proto = onnx_ir.to_proto(model)
    _strip(proto)
    _check(proto, signature)
    return proto


def _export(module: nn.Module, signature: Signature) -> torch.onnx.ONNXProgram:
    dtypes = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
    examples, dynamic = [], []
    sizes, dimensions = _example_sizes(signature), _dimensions(signature)
    for spec in signature.inputs:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes]
        examples.append(torch.zeros(shape, dtype=dtypes[spec.data_type]))
        dynamic.append({i: dimensions[axis] for i, axis in enumerate(spec.axes) if axis in dimensions})
    with warnings.catch_warnings(), quiet("torch.onnx"), _no_collection(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            tuple(examples),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=(tuple(dynamic),),
            input_names=[spec.name for spec in signature.inputs],
            output_names=[spec.name for spec in signature.outputs],
            verbose=False,
        )
    if program is None:
        raise ExportError("torch.onnx.export returned no program; see its log")
    return program


def _example_sizes(signature: Signature) -> dict[str, int]:
    lengths = zip(signature.sequence_axes, EXAMPLE_LENGTHS, strict=False)
    # A mask is traced with one head for all.
    fixed = {BATCH_AXIS: EXAMPLE_BATCH, MASK_HEADS_AXIS: 1}
    return fixed | {axis: signature.clip(axis, length) for axis, length in lengths}


def _dimensions(signature: Signature) -> dict[str | int, str | torch.export.Dim]:
    """How the tracer is told of each symbolic axis: by its name, and by its largest size if it has one."""
    axes = [axis for axis in signature.axes if axis != MASK_HEADS_AXIS]
    largest = signature.max_lengths
    return {axis: torch.export.Dim(axis, max=largest[axis]) if axis in largest else axis for axis in axes}


class quiet:  # noqa: N801 - a context manager, named like a function
    """Suppresses a logger's messages below the level ERROR while the block runs."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def __enter__(self) -> None:
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disables Python's garbage collector while the block runs.

    The exporter parses the sources of its operators. Before 3.11.8 and 3.12.2, Python raises a SystemError
    there if the collector runs while another thread parses too, as it does to print a traceback
    (github.com/python/cpython/issues/106905). The export also takes an eighth less time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _strip(proto: onnx.ModelProto) -> None:
    """Removes the tracer's debugging data: stack traces with paths, and intermediate shapes."""
    del proto.graph.value_info[:]
    del proto.graph.metadata_props[:]
    del proto.metadata_props[:]
    for node in proto.graph.node:
        del node.metadata_props[:]
        node.ClearField("doc_string")
    for value in (*proto.graph.input, *proto.graph.output):
        del value.metadata_props[:]
    for initializer in proto.graph.initializer:
        del initializer.metadata_props[:]


def _check(proto: onnx.ModelProto, signature: Signature) -> None:
    values = [*proto.graph.input, *proto.graph.output]
    for value, spec in zip(values, (*signature.inputs, *signature.outputs), strict=True):
        dims = value.type.tensor_type.shape.dim
        axes = tuple(dim.dim_param or dim.dim_value for dim in dims)
        if (value.name, axes) != (spec.name, spec.axes):
            raise ExportError(f"the graph has {value.name} {axes}; expected {spec.name} {spec.axes}")
    foreign = sorted({f"{node.domain}.{node.op_type}" for node in proto.graph.node if node.domain})
    if foreign or proto.functions:
        raise ExportError(f"the graph uses operators outside the ONNX standard: {', '.join(foreign)}")
