"""Exports a module as one ONNX graph with named symbolic axes and standard operators."""

import builtins
import gc
import io
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import onnx
import onnx_ir
import torch
from torch import nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

from attention_serving.artifact.manifest import BATCH_AXIS
from attention_serving.export.adapted import AdaptedModule
from attention_serving.export.assumptions import (
    Assumption,
    Place,
    record_assumptions,
    user_line,
    user_place,
)
from attention_serving.export.derived import MOST_STRIDE
from attention_serving.export.errors import ExportError
from attention_serving.export.masks import remove_masks
from attention_serving.export.rewrite import (
    axes_of,
    expand_masks,
    expand_rotary,
    merge_heads,
    read_sizes_once,
)
from attention_serving.export.signature import (
    MASK_HEADS_AXIS,
    PositionalModule,
    Signature,
    without_fused_layers,
)
from attention_serving.export.translations import add_operators

OPSET = 23
# Sizes at export: of the batch, and of the sequence axes in their order. They differ from each other, so
# that two confused axes are noticed, and from 1, which the tracer takes for a constant.
EXAMPLE_BATCH, EXAMPLE_LENGTHS = 2, (3, 5, 11, 17)


class Traced(NamedTuple):
    """A traced graph, with the shapes of its values, and what it assumes of sizes."""

    model: onnx_ir.Model
    assumptions: Sequence[Assumption]


def trace(module: nn.Module, signature: Signature) -> Traced:
    """Traces the graph of one signature.

    Raises:
        ExportError: The module cannot be traced.
    """
    with (
        collect_log("torch") as log,
        collect_log("onnxscript"),
        redirect_stdout(log),
        redirect_stderr(log),
        _symbolic_sizes() as numbers,
        record_assumptions(signature) as assumptions,
    ):
        adapted = _adapted_part(module)
        size = 0 if adapted is None else adapted.return_to_start()
        try:
            program = _export(PositionalModule(module, signature), signature, size)
        except ExportError:
            raise
        except Exception as error:  # the tracer and the module may raise anything
            places = [*numbers, *(assumption.place for assumption in assumptions[-1:])]
            raise _untraceable(module, signature, assumptions, places, error, log.getvalue()) from error
    for value, spec in zip(program.model.graph.inputs, signature.inputs, strict=True):
        # Operators broadcast a mask of one head, and take one of H heads as well: the axis traced as 1
        # becomes symbolic. The parity report covers both sizes.
        if MASK_HEADS_AXIS in spec.axes:
            value.shape = onnx_ir.Shape(spec.axes)
    for value, spec in zip(program.model.graph.outputs, signature.outputs, strict=True):
        # A size such as Min(length, 8 * ceil(length / 8)) is that of an axis: the parity report proves it.
        sizes = zip(axes_of(value), spec.axes, strict=True)
        value.shape = onnx_ir.Shape([axis if isinstance(size, str) else size for size, axis in sizes])
    _rename_inner_values(program.model)
    read_sizes_once(program.model)
    expand_masks(program.model)
    remove_masks(program.model)
    expand_rotary(program.model)
    merge_heads(program.model)
    return Traced(program.model, assumptions)


def _untraceable(
    module: nn.Module,
    signature: Signature,
    assumptions: Sequence[Assumption],
    places: Sequence[Place],
    error: Exception,
    log: str,
) -> ExportError:
    """Why a trace failed, and what to try. The first error of a chain is the closest to the module."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = f"{error}\n{cause}"
    details = "\n".join(traceback.format_exception(error)) + log
    adapted = _adapted_part(module)
    undecided = [] if adapted is None else adapted.calls.undecided
    line = user_line(details)
    message = f"{type(cause).__name__}: {next(iter(str(cause).strip().splitlines()), '')}"
    if isinstance(cause, ExportError):
        reason = f"{cause}{line}"
    elif operator := re.search(r"Error when translating node.*?target=torch\.ops\.([\w.]+)", text):
        lacks = "has no ONNX form of" if "DispatchError" in details else "fails to convert"
        reason = f"the exporter {lacks} {operator[1]}{line}; compute it with other operators"
    elif "data-dependent" in text:
        place = f", at {undecided[0]}" if undecided else line
        reason = (
            f"the module branches on the values of a tensor{place}, or makes a size of them. A graph cannot: "
            f"compute both sides and choose with torch.where, pass is_causal=False to PyTorch's own layers, "
            f"or branch on what does not depend on the inputs"
        )
    elif re.search(
        r"pecialized|onstraints violated|generated guard|not all values|inferred ranges", text, re.I
    ):
        last = assumptions[-1] if assumptions and places[0] == assumptions[-1].place else None
        place = f", at {places[0]}" if places else line
        axes = " and ".join(last.axes) if last else "an axis"
        reason = (
            f"the module fixes the size of {axes}, loops over it, or branches on it{place}. Compute "
            f"the same for all sizes: take them from x.shape without int() or a Python list of that many "
            f"elements"
        )
        if last and last.axes[0] in signature.sequence_axes:
            reason += "; if only short sequences are allowed, pass the largest length as max_length"
    else:
        reason = (
            f"it raises {message}{line}. It runs in eager PyTorch, and why the tracer fails is not known; "
            f"compute that line with other operators, or report the details"
        )
    sizes = _example_sizes(signature)
    shapes = ", ".join(
        f"{spec.name} {[sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes]}"
        for spec in signature.inputs
    )
    return ExportError(
        f"graph {signature.kind}: the module cannot be traced over {shapes}: {reason}",
        details,
    )


def _adapted_part(module: nn.Module) -> AdaptedModule | None:
    """A module of somebody else, perhaps inside one that computes in half precision."""
    return next((part for part in module.modules() if isinstance(part, AdaptedModule)), None)


def _rename_inner_values(model: onnx_ir.Model) -> None:
    """Renames values that have the name of an input or output: the tracer names values after operators."""
    outer = {*model.graph.inputs, *model.graph.outputs}
    names = {value.name for value in outer}
    inner = (value for node in model.graph for value in node.outputs if value not in outer)
    for index, value in enumerate(inner):
        if value.name in names:
            value.name = f"{value.name}.{index}"


def finish_graph(model: onnx_ir.Model, signature: Signature) -> onnx.ModelProto:
    """The graph to store: without debugging data, and checked.

    Raises:
        ExportError: The graph lost a symbolic axis, or uses an operator outside the ONNX standard.
    """
    proto = onnx_ir.to_proto(model)
    strip(proto)
    _rename_operators(proto.graph)
    _check(proto, signature)
    return proto


def _export(module: nn.Module, signature: Signature, size: int) -> torch.onnx.ONNXProgram:
    dtypes = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
    examples, names = [], []
    sizes = _example_sizes(signature, size)
    for spec in signature.inputs:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes]
        examples.append(torch.zeros(shape, dtype=dtypes[spec.data_type]))
        axes = {at: axis for at, axis in enumerate(spec.axes) if isinstance(axis, str)}
        names.append({at: axis for at, axis in axes.items() if axis != MASK_HEADS_AXIS})
    # The tracer notes what it assumes of sizes within their bounds. Named dimensions would raise instead.
    dynamic = [{at: _dimension(signature, axis) for at, axis in axes.items()} for axes in names]
    with (
        warnings.catch_warnings(),
        _no_collection(),
        _operators_parsed_once(),
        torch.no_grad(),
        without_fused_layers(),
        # A cache of shapes pays where shapes repeat. In a graph this small they seldom do: without it, an
        # export takes a tenth to a third less time.
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
    ):
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
        program._rename_dynamic_axes((tuple(names),))
    return program


def _example_sizes(signature: Signature, size: int = 0) -> dict[str, int]:
    """A size for each symbolic axis; lengths are larger than `size`, and those of outputs than 1."""
    least, steps, derived = signature.min_lengths, signature.length_multiples, signature.derived_axes.values()
    # A mask is traced with one head for all.
    sizes = {BATCH_AXIS: EXAMPLE_BATCH, MASK_HEADS_AXIS: 1}
    for factor in range(1, MOST_STRIDE + 1):
        for axis, length in zip(signature.sequence_axes, EXAMPLE_LENGTHS, strict=False):
            rows = size + factor * length
            sizes[axis] = signature.clip(axis, rows * steps.get(axis, 1) + least.get(axis, 1) - 1)
        if all(formula.size(sizes[formula.axis]) > 1 for formula in derived):
            break
    return sizes


def _dimension(signature: Signature, axis: str) -> Any:
    """How the tracer is told of a symbolic axis: by the bounds of its size."""
    return torch.export.Dim.DYNAMIC(min=signature.min_lengths.get(axis), max=signature.max_lengths.get(axis))


@contextmanager
def collect_log(name: str) -> Iterator[io.StringIO]:
    """Collects what a logger and those below it write while the block runs, in place of showing it."""
    log = io.StringIO()
    names = [logger for logger in logging.root.manager.loggerDict if f"{logger}.".startswith(f"{name}.")]
    # Those below it may have handlers of their own.
    loggers = [logging.getLogger(logger) for logger in {*names, name}]
    before = [
        (logger, logger.handlers, logger.propagate)
        for logger in loggers
        if logger.handlers or logger.name == name
    ]
    for logger, *_ in before:
        logger.handlers, logger.propagate = [logging.StreamHandler(log)], False
    try:
        yield log
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate


@contextmanager
def _symbolic_sizes() -> Iterator[list[Place]]:
    """Lets `len` of a tensor return a symbol while the block runs, and symbols be keys of a dict.

    Python's own `len` returns numbers only. Tables that a module keeps by length are made in each trace.

    Yields:
        The lines that make a number of a symbol, such as those of lists with an element for each row.
    """
    original, lines = len, list[Place]()

    def symbolic(value: Any) -> Any:
        return value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else original(value)

    def digest(size: torch.SymInt) -> int:
        return hash((id(size.node.shape_env), str(size.node.expr)))

    def record(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def convert(value: Any) -> Any:
            size = value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else value
            if isinstance(size, torch.SymInt) and (place := user_place()) is not None:
                lines.append(place)
            return function(value)

        return convert

    converters = ((torch.SymInt, "__index__"), (torch.SymInt, "__int__"), (torch.Tensor, "__iter__"))
    with ExitStack() as stack:
        for kind, name in converters:
            stack.enter_context(patch.object(kind, name, record(getattr(kind, name))))
        stack.enter_context(patch.object(torch.SymInt, "__hash__", digest))
        stack.enter_context(patch.object(builtins, "len", symbolic))
        yield lines


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


@contextmanager
def _operators_parsed_once() -> Iterator[None]:
    """Keeps the exporter's table of ONNX operators from one graph to the next while the block runs.

    Otherwise the exporter parses the sources of its 500 operators for each graph, which takes a quarter of
    the time. The table depends on the opset only. Other exports of this process, which may add to it, do not
    get it.
    """
    original = ONNXRegistry.__dict__["from_torchlib"]
    ONNXRegistry.from_torchlib = staticmethod(_operators)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = original  # type: ignore[method-assign]


_from_torchlib = ONNXRegistry.from_torchlib


@cache
def _operators(opset_version: int = OPSET) -> ONNXRegistry:
    registry = _from_torchlib(opset_version)
    add_operators(registry)
    return registry


def strip(proto: onnx.ModelProto) -> None:
    """Removes debugging data, such as stack traces with paths, and intermediate shapes."""
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


def _rename_operators(graph: onnx.GraphProto) -> None:
    """Names operators by their place. The tracer counts those too that it has removed."""
    for index, node in enumerate(graph.node):
        node.name = f"{node.op_type}_{index}"
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename_operators(attribute.g)


def _check(proto: onnx.ModelProto, signature: Signature) -> None:
    values = [*proto.graph.input, *proto.graph.output]
    for value, spec in zip(values, (*signature.inputs, *signature.outputs), strict=True):
        dims = value.type.tensor_type.shape.dim
        axes = tuple(dim.dim_param or dim.dim_value for dim in dims)
        data_type = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
        if (value.name, data_type, axes) != (spec.name, spec.data_type, spec.axes):
            contract = f"{spec.name} {spec.data_type} {spec.axes}"
            raise ExportError(f"the graph has {value.name} {data_type} {axes}; expected {contract}")
    foreign = sorted({f"{node.domain}.{node.op_type}" for node in proto.graph.node if node.domain})
    if foreign or proto.functions:
        raise ExportError(f"the graph uses operators outside the ONNX standard: {', '.join(foreign)}")
