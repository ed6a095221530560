"""An ONNX file that exists already: what it takes, its runs, and its graphs with lengths in place of masks.

Shapes: B batch, T rows of a sequence.
"""

import hashlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.version_converter import convert_version
from onnx_ir import AttributeType, DataType, Node, Value
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
)
from torch import Tensor, nn

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.external_data import external_locations
from attention_serving.artifact.golden import Arrays
from attention_serving.artifact.manifest import BATCH_AXIS, TensorSpec, file_hash
from attention_serving.export.adapted import Mask, Meaning, is_mask_name
from attention_serving.export.errors import ExportError, first_line
from attention_serving.export.graph import strip
from attention_serving.export.parity import open_session
from attention_serving.export.precision import Precision
from attention_serving.export.rewrite import Builder, axes_of
from attention_serving.export.signature import Signature, shapes_of

# The largest message of protobuf, which a file without external data is.
MOST_BYTES = (1 << 31) - 1
REALS = (DataType.FLOAT, DataType.FLOAT16, DataType.DOUBLE)
SMALL_INTEGERS = (DataType.INT8, DataType.UINT8, DataType.INT16, DataType.UINT16)
INTEGERS = (DataType.INT64, DataType.INT32, DataType.UINT32, *SMALL_INTEGERS)
# Operators that compute in 8 bits or with weights of fewer.
QUANTISED = re.compile(r"Quantize|Integer|NBits|^Q(Linear|Gemm|Attention)")
# Operators that compute a scale from all rows of a run.
COMMON_SCALE = "DynamicQuantize"
# Operators that look up rows of a table: by input of ids, the input that is the table.
TABLES = {"Gather": {1: 0}, "EmbedLayerNormalization": {0: 2, 1: 4}}
# Operators that keep the values of their first input.
RESHAPING = (
    "Cast",
    "Identity",
    "Reshape",
    "Unsqueeze",
    "Squeeze",
    "Flatten",
    "Transpose",
    "DequantizeLinear",
)
RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}
# By operator of control flow, the inputs that decide which operators run, and how often.
DECIDING = {"If": (0,), "Loop": (0, 1)}
EXAMPLE_LENGTH = 7
# The version of operators for which the evaluator has all forms of quantisation.
EVALUATED_OPSET = 21
RUNTIME = f"ONNX Runtime {onnxruntime.__version__}"
EVALUATOR = f"ReferenceEvaluator of onnx {onnx.__version__}"


class FileModule(nn.Module):
    """Calls an ONNX file with tensors by name, as served: float32, int64 or bool."""

    def __init__(self, run: Callable[..., Any], file: "OnnxFile", runtime: str) -> None:
        super().__init__()
        self._run, self._file, self._runtime = run, file, runtime

    def __deepcopy__(self, memo: Any) -> Self:
        """The same: a run does not change a file."""
        return self

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Runs the file. Returns its outputs by name.

        Raises:
            ExportError: The run fails.
        """
        arrays = {
            name: values.numpy().astype(self._file.inputs[name].numpy()) for name, values in inputs.items()
        }
        try:
            results = self._run([*self._file.outputs], arrays)
        except Exception as error:  # ONNX Runtime and the evaluator raise many types
            raise ExportError(
                f"{self._file.path.name} fails in {self._runtime} for {shapes_of(arrays)}: "
                f"{_first_line(error)}",
                traceback.format_exc(),
            ) from error
        return {
            name: torch.from_numpy(np.array(result, order="C"))
            for name, result in zip(self._file.outputs, results, strict=True)
        }


@dataclass(frozen=True, eq=False)
class OnnxFile:
    """A file.

    Attributes:
        path: Where it is.
        model: Its graph, with all weights.
        digest: SHA-256 of the file and of its external data.
    """

    path: Path
    model: onnx_ir.Model
    digest: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file and its external data.

        Raises:
            ExportError: It is not an ONNX file, or is not one that can be served.
        """
        if path.stat().st_size > MOST_BYTES:
            raise ExportError(
                f"{path} has more than 2 GiB: save its weights beside it, with "
                f"onnx.save(model, path, save_as_external_data=True)"
            )
        try:
            files = [path, *(_inside(path, location) for location in sorted(external_locations(path)))]
            digest = hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()
            model = onnx_ir.from_proto(onnx.load_model(path, format="protobuf"))
        except (ExportError, OSError):
            raise
        except ArtifactError as error:
            raise ExportError(f"{path.parent}/{error.reason}") from error
        except Exception as error:  # a damaged file raises many types
            raise ExportError(f"{path} is not an ONNX file: {_first_line(error)}") from error
        for simplify in (InlinePass(), RemoveInitializersFromInputsPass(), LiftConstantsToInitializersPass()):
            simplify(model)
        file = cls(path, model, digest)
        file._check()
        return file

    @cached_property
    def inputs(self) -> dict[str, DataType]:
        """Element type of each input."""
        return {str(value.name): value.dtype or DataType.UNDEFINED for value in self.model.graph.inputs}

    @cached_property
    def outputs(self) -> dict[str, DataType]:
        """Element type of each output."""
        return {str(value.name): value.dtype or DataType.UNDEFINED for value in self.model.graph.outputs}

    @property
    def shapes(self) -> dict[str, list[int | str | None]]:
        """Sizes or names of the axes of each input and output; None for an axis without either."""
        return {
            str(value.name): axes_of(value) for value in (*self.model.graph.inputs, *self.model.graph.outputs)
        }

    @property
    def opset(self) -> int:
        """Version of the operators of the ONNX standard."""
        return self.model.opset_imports.get("", 1)

    @cached_property
    def operators(self) -> set[str]:
        """Names of its operators."""
        return {node.op_type for node in self.model.graph.all_nodes()}

    @property
    def precision(self) -> Precision:
        """That of its arithmetic, as its operators and weights show it."""
        if any(map(QUANTISED.search, self.operators)):
            return Precision.INT8
        return Precision.FP16 if 2 * self._elements(DataType.FLOAT16) > self.parameters else Precision.FP32

    @property
    def shares_scales(self) -> bool:
        """Whether the sequences of a run share scales of 8 bits, and so change each other's results."""
        return any(COMMON_SCALE in operator for operator in self.operators)

    @property
    def parameters(self) -> int:
        """Number of elements of its weights."""
        return self._elements(*REALS, DataType.BFLOAT16, *SMALL_INTEGERS)

    def _elements(self, *types: DataType) -> int:
        weights = (value.const_value for value in self.model.graph.initializers.values())
        return sum(tensor.size for tensor in weights if tensor is not None and tensor.dtype in types)

    def _check(self) -> None:
        for value in (*self.model.graph.inputs, *self.model.graph.outputs):
            is_tensor = isinstance(value.type, onnx_ir.TensorType) and value.shape is not None
            if not is_tensor or value.dtype not in (*REALS, *INTEGERS, DataType.BOOL):
                raise ExportError(
                    f"{self.path}: {value.name} is {value.type} {value.shape}; inputs and outputs must be "
                    f"tensors of float16, float32, float64, integers or booleans, with a number of axes"
                )
        if not self.inputs or not self.outputs:
            raise ExportError(f"{self.path} is not an ONNX file with inputs and outputs")
        if drawn := self.operators & RANDOM:
            raise ExportError(
                f"{self.path}: the operator {min(drawn)} draws random numbers; make the file of a model in "
                f"evaluation mode"
            )
        if (node := self._branch_on_values()) is not None:
            raise ExportError(
                f"{self.path}: the operator {node.op_type} {node.name!r} decides by values of inputs, and "
                f"all sequences of a batch would follow one decision: choose for each sequence with Where"
            )

    def _branch_on_values(self) -> Node | None:
        """An operator of control flow that depends on values of inputs, beyond their shapes."""
        of_values, loops = set(self.model.graph.inputs), list[Node]()
        for node in self.model.graph.all_nodes():
            if any(node.inputs[at] in of_values for at in DECIDING.get(node.op_type, ())):
                return node
            graphs = [
                attribute.as_graph()
                for attribute in node.attributes.values()
                if attribute.type is AttributeType.GRAPH
            ]
            if graphs or (node.op_type not in ("Shape", "Size") and not of_values.isdisjoint(node.inputs)):
                of_values.update(node.outputs)
            if node.op_type == "Loop":
                loops.append(node)
                of_values.update(graphs[0].inputs[2:])  # after the number of the turn, and the condition
            elif node.op_type == "Scan":
                of_values.update(graphs[0].inputs)
        return next(
            (loop for loop in loops if loop.attributes["body"].as_graph().outputs[0] in of_values), None
        )

    def axes(self) -> dict[str, dict[int, str]]:
        """By input all of whose axes have a size or a name, the names; the first one is the batch.

        Raises:
            ExportError: The first axis of an input is fixed.
        """
        axes = dict[str, dict[int, str]]()
        for value in self.model.graph.inputs:
            sizes = axes_of(value)
            if not sizes or isinstance(sizes[0], int):
                raise ExportError(
                    f"{self.path}: input {value.name} {sizes} has no batch axis that varies, and servers run "
                    f"requests of several callers together: export the file again with a dynamic axis 0 of "
                    f"every input and output"
                )
            names = {at: size for at, size in enumerate(sizes) if not isinstance(size, int)}
            if max(names) > 1 and not is_mask_name(str(value.name)):
                raise ExportError(
                    f"{self.path}: axis {max(names)} of input {value.name} {sizes} varies; only axis 0, the "
                    f"batch, and axis 1, the rows of a sequence, can: export the file again with a fixed size"
                )
            # tf2onnx gives every axis a name of its own.
            if all(name and not name.startswith("unk__") for at, name in names.items() if at):
                axes[str(value.name)] = {at: (str(name) if at else BATCH_AXIS) for at, name in names.items()}
        return axes

    def example(self, vectors: Arrays | None) -> dict[str, Tensor]:
        """Inputs as served, with the largest id of each: two sequences, or golden vectors.

        Raises:
            ExportError: The range of the ids of an input is not known.
        """
        example = dict[str, Tensor]()
        for value in self.model.graph.inputs:
            name, axes = str(value.name), axes_of(value)[1:]
            shape = [2, *(axis if isinstance(axis, int) else EXAMPLE_LENGTH for axis in axes)]
            if value.dtype in REALS:
                example[name] = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            elif value.dtype is DataType.BOOL:
                example[name] = torch.full(shape, "padding" not in name)
            else:
                bound = self._id_bound(value, None if vectors is None else int(vectors[name].max()) + 1)
                example[name] = torch.full(shape, bound - 1)
            if vectors is not None:
                ids, example[name] = example[name], torch.from_numpy(vectors[name].copy())
                if value.dtype in INTEGERS:
                    example[name].view(-1)[0] = ids.max()
        return example

    def _id_bound(self, ids: Value, usual: int | None) -> int:
        """One above the largest id: that of the smallest table it is an index of, of its type, or usual."""
        if is_mask_name(str(ids.name)):
            return 2
        pending, bounds = [ids], list[int]()
        while pending:
            for node, at in pending.pop().uses():
                if (table := TABLES.get(node.op_type, {}).get(at)) is not None:
                    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
                    bounds += _table_size(node.inputs[table], axis)
                elif at == 0 and node.op_type in RESHAPING:
                    pending += node.outputs
        if ids.dtype in SMALL_INTEGERS:
            bounds.append(int(np.iinfo(ids.dtype.numpy()).max) + 1)
        if not bounds and usual is not None:
            return usual
        if not bounds:
            raise ExportError(
                f"{self.path}: no embedding reads the integers of input {ids.name}, so that their range is "
                f"not known: give golden vectors with values of the whole range"
            )
        return min(bounds)

    def session(self) -> FileModule:
        """The file in ONNX Runtime on the CPU.

        Raises:
            ExportError: ONNX Runtime does not take it.
        """
        try:
            session = open_session(self.path.resolve())
        except Exception as error:  # ONNX Runtime raises many types
            raise ExportError(
                f"{RUNTIME} does not run {self.path} on its CPU provider: {_first_line(error)}",
                traceback.format_exc(),
            ) from error
        return FileModule(session.run, self, RUNTIME)

    def evaluator(self) -> FileModule:
        """The file in ONNX's reference evaluator.

        Raises:
            ExportError: The evaluator lacks an operator of the file.
        """
        model = onnx.load_model(self.path)
        try:
            try:
                evaluator = ReferenceEvaluator(model)
            except Exception:  # it lacks earlier forms of some operators
                evaluator = ReferenceEvaluator(convert_version(model, EVALUATED_OPSET))
        except Exception as error:  # both raise many types
            raise ExportError(f"{EVALUATOR} does not take {self.path}: {_first_line(error)}") from error
        return FileModule(evaluator.run, self, EVALUATOR)

    def graph(
        self, signature: Signature, masks: Sequence[Mask], parameters: Mapping[str, str]
    ) -> onnx.ModelProto:
        """The graph of a signature: served types, and lengths or nothing in place of masks.

        Args:
            signature: Its inputs and outputs.
            masks: The inputs of the file that the graph does not have.
            parameters: By input of the graph, that of the file if its name differs.
        """
        model, builder = self.model.clone(), Builder("served")
        graph, specs = model.graph, {spec.name: spec for spec in signature.inputs}
        values = {str(value.name): value for value in graph.inputs}
        served = {name: _value(spec) for name, spec in specs.items()}
        for name, value in served.items():
            if (inner := values.get(parameters.get(name, name))) is not None:
                inner.name = f"{inner.name}.file"
                builder.nodes.append(_cast(value, inner))
        for mask in masks:
            axis = mask.sequence_axes[0]
            rows = next(served[spec.name] for spec in signature.inputs if spec.length_axis == axis)
            names = (name for name, of in signature.lengths.items() if of == axis)
            lengths = served.get(next(names, ""))
            inner = values[mask.name]
            inner.name = f"{inner.name}.file"
            builder.nodes.append(_cast(_mask(builder, mask, rows, lengths), inner))
        graph.inputs[:] = [*served.values()]
        graph.insert_before(graph[0], builder.nodes)
        for at, spec in enumerate(signature.outputs):
            inner = graph.outputs[at]
            inner.name = f"{inner.name}.file"
            graph.outputs[at] = _value(spec)
            graph.append(_cast(inner, graph.outputs[at]))
        proto = onnx_ir.to_proto(model)
        strip(proto)
        for tensor in proto.graph.initializer:
            if not tensor.HasField("raw_data"):
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
        return proto


def _inside(path: Path, location: str) -> Path:
    folder, data = path.parent.resolve(), (path.parent / location).resolve()
    if not data.is_relative_to(folder):
        raise ExportError(
            f"{path} names external data outside its folder: {location!r}; move it beside the file"
        )
    if not data.is_file():
        raise ExportError(f"{path} names external data that does not exist: {location!r}")
    return data


def _table_size(table: Value | None, axis: int) -> Iterator[int]:
    """The size of an axis of a table, which can be quantised."""
    while table is not None and table.const_value is None:
        node = table.producer()
        table = node.inputs[0] if node is not None and node.op_type in RESHAPING[-1:] else None
    if table is not None and table.const_value is not None:
        yield table.const_value.numpy().shape[axis]


def _value(spec: TensorSpec) -> Value:
    data_type = DataType.from_numpy(np.dtype(spec.data_type))
    return Value(name=spec.name, shape=onnx_ir.Shape(spec.axes), type=onnx_ir.TensorType(data_type))


def _cast(value: Value, result: Value) -> Node:
    """The operator that makes a value of another: of another type, or the same."""
    attributes = [onnx_ir.AttrInt64("to", result.dtype or DataType.FLOAT)]
    return Node("", "Cast", [value], attributes, outputs=[result])


def _mask(builder: Builder, mask: Mask, rows: Value, lengths: Value | None) -> Value:
    """The mask (B, ..., T) of the lengths (B,) of rows (B, T, ...); without them, every row attends.

    Its operators exist since opset 9.
    """
    shape, true = builder.op("Shape", rows), onnx_ir.tensor(np.array([True]))
    sizes = builder.op("Gather", shape, builder.constant(np.array([0, 1])))
    allowed = builder.op("ConstantOfShape", sizes, value=true)  # (B, T)
    if lengths is not None:
        length = builder.op("Gather", shape, builder.constant(np.array([1])))
        positions = builder.op("NonZero", builder.op("ConstantOfShape", length, value=true))  # (1, T)
        column = builder.op("Reshape", lengths, builder.constant(np.array([-1, 1])))
        allowed = builder.op("Less", positions, column)
    middle = [int(size) for size in mask.axes[1:-1]]
    if middle:
        ones = builder.constant(np.array([0, *(1 for _ in middle), -1]))
        full = builder.constant(np.array([1, *middle, 1]))
        allowed = builder.op("Expand", builder.op("Reshape", allowed, ones), full)
    if mask.meaning is Meaning.ADDED:
        zero, infinity = (builder.constant(np.array(number, np.float32)) for number in (0, -np.inf))
        return builder.op("Where", allowed, zero, infinity)
    return builder.op("Not", allowed) if mask.meaning is Meaning.HIDES else allowed


def _first_line(error: Exception) -> str:
    return first_line(error).rstrip(".")
