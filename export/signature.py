"""What is exported: the inputs and outputs of each graph, and calls of eager PyTorch with them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import onnx
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attention_serving.artifact.encoder import ClassifierFacts, EncoderFacts
from attention_serving.artifact.golden import Arrays, GoldenCase
from attention_serving.artifact.manifest import (
    ATTENTION_MASK,
    BATCH_AXIS,
    BLOCK_ROWS,
    IN_BLOCKS,
    KEY_LENGTHS,
    KEY_POSITIONS,
    OF_CONTEXTS,
    POSITIONS,
    PROJECTED,
    QUERY_LENGTHS,
    TEXT_ATTENTION_GRAPHS,
    Cost,
    DerivedAxis,
    GraphKind,
    TensorSpec,
    all_sizes,
    sequence_axes,
)
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.errors import ExportError
from attention_serving.export.precision import TOLERANCES, Precision
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.text import TextAttention

QUERY_AXIS = "query_length"
KEY_AXIS = "key_length"
MASK_HEADS_AXIS = "mask_heads"
# Rotary positions are tested below this bound. Angles are float32, whose error grows with the position.
MAX_POSITION = 4096
# The sizes that modules are traced and probed with are distinct for the batch and up to four lengths.
MAX_SEQUENCE_AXES = 4
UNKNOWN_COST = Cost(flops_per_query=0, flops_per_key=0, flops_per_pair=0)
# The output of Hugging Face models that only the next step of a generation needs.
CACHE_FIELD = "past_key_values"
AttentionModule = MultiHeadAttention | TextAttention
IdBound: TypeAlias = int | tuple[int, ...]
"""The exclusive upper bound of ids, or that of each column of ids (B, F)."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Inputs and outputs of one graph.

    Attributes:
        options: Keyword arguments of the module beside its inputs.
        method: The module's method that computes the graph.
        key_axis: The axis that masks and lengths refer to.
        num_heads: The largest size of a mask's head axis.
        least_key_length: The smallest key length to test with. Attention modules define the result of a
            sequence without keys; other modules need not.
        max_lengths: By symbolic axis, the largest size that the module takes.
        min_lengths: By symbolic axis, the smallest size that the module takes; 1 if absent.
        length_multiples: By symbolic axis, what every size is a multiple of; 1 if absent.
        ranges: By input, the values that it is tested with; standard normal ones if absent.
        flags: By input of flags, the value that each sequence has first; the other value comes next.
        lengths: By input that holds lengths, the axis.
        derived_axes: By symbolic axis of outputs that the inputs lack, how its size follows from theirs.
        attention_weights: The output with attention weights, of a non-attention module; empty without.
    """

    kind: GraphKind
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    method: str = "forward"
    key_axis: str = QUERY_AXIS
    num_heads: int = 1
    least_key_length: int = 0
    max_lengths: Mapping[str, int] = field(default_factory=dict)
    min_lengths: Mapping[str, int] = field(default_factory=dict)
    length_multiples: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[str, "ValueRange"] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    lengths: Mapping[str, str] = field(default_factory=dict)
    derived_axes: Mapping[str, DerivedAxis] = field(default_factory=dict)
    attention_weights: str = ""

    @property
    def axes(self) -> list[str]:
        """Symbolic axes in the order of the inputs."""
        symbolic = (axis for spec in self.inputs for axis in spec.axes if isinstance(axis, str))
        return list(dict.fromkeys(symbolic))

    @property
    def module_inputs(self) -> list[TensorSpec]:
        """The inputs that the module takes: all but the rows of a block, which change no result."""
        return [spec for spec in self.inputs if spec.name != BLOCK_ROWS]

    @property
    def sequence_axes(self) -> list[str]:
        """Symbolic axes of lengths, in the order of the inputs."""
        return [axis for axis in self.axes if axis not in (BATCH_AXIS, MASK_HEADS_AXIS)]

    def describe(self) -> Iterator[str]:
        """The lengths that the module takes, and its attention weights, in a line for each."""
        for axis in sequence_axes(self.inputs):
            most, step = self.max_lengths.get(axis), self.length_multiples.get(axis)
            limits = f"from {self.min_lengths.get(axis, 1)}{f' to {most}' if most else ''}"
            yield f"lengths of {axis}: {limits}{f', multiples of {step}' if step else ''}"
        if self.attention_weights:
            yield f"attention weights: output {self.attention_weights}"

    def part_of(self, module: nn.Module) -> nn.Module:
        """What computes the graph: the module, or one of its methods as a module."""
        return module if self.method == "forward" else _MethodOf(module, self.method)

    def clip(self, axis: str, size: int) -> int:
        """The size, or one near it that the module takes on that axis."""
        step = self.length_multiples.get(axis, 1)
        size = -(-size // step) * step
        return min(max(size, self.min_lengths.get(axis, 1)), self.max_lengths.get(axis, size) // step * step)

    def axis_of_lengths(self, name: str) -> str:
        """The axis whose lengths an input holds."""
        usual = {KEY_LENGTHS: self.key_axis, QUERY_LENGTHS: sequence_axes(self.inputs)[0]}
        return self.lengths.get(name) or usual[name]


# Values are taken for standard normal ones, as torch.randn makes, if they deviate by as much from their mean.
USUAL_DEVIATIONS = (0.5, 2.0)
# Columns have ranges of their own if their largest values differ by this factor.
DIFFERENT_SCALES = 16
# A bound that is this many times closer to zero than the other one is taken for zero.
NEAR_ZERO = 8


@dataclass(frozen=True)
class ValueRange:
    """The values of an input: each row is drawn evenly between bounds, those of one of the examples.

    Bounds are numbers, or have an element for each element of a row. Numbers are powers of two, so that two
    random examples of one kind have the same.
    """

    bounds: tuple[tuple[Any, Any], ...]

    @classmethod
    def of(
        cls,
        examples: Sequence[Tensor],
        axes: Sequence[str | int] = (BATCH_AXIS, QUERY_AXIS),
        *,
        usual: bool = True,
    ) -> Self | None:
        """The range of example values (B, T, ...), or of an input without a sequence axis.

        Args:
            examples: The values.
            axes: Those of the input, as in its specification.
            usual: Whether constant and standard normal examples have none.
        """
        tables = [
            example.detach().flatten(0, _last_row_axis(example, axes)).double().numpy()
            for example in examples
        ]
        if not all(table.size for table in tables) or (usual and all(map(_is_usual, tables))):
            return None
        return cls(tuple(map(_bounds, tables)))

    def draw(self, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray[Any, np.dtype[Any]]:
        """Random values of a shape (B, T, ...) or (B,)."""
        values = [rng.uniform(low, high, shape) for low, high in self.bounds]
        chosen = rng.integers(len(values), size=(*shape[:2], *(1 for _ in shape[2:])))
        return np.choose(chosen, values).astype(np.float32)


def _last_row_axis(example: Tensor, axes: Sequence[str | int]) -> int:
    """The last of the first axes of an example along which elements have the same range.

    These are the sequences and their rows; the sequences of (B, F) columns; all axes of images (B, C, H, W).
    """
    if example.ndim == 1 or (example.ndim == 2 and isinstance(axes[1], int)):  # noqa: PLR2004
        return 0
    return -1 if example.ndim > 3 and isinstance(axes[1], int) else 1  # noqa: PLR2004


def _bounds(rows: np.ndarray[Any, np.dtype[Any]]) -> tuple[Any, Any]:
    tops = np.abs(rows).max(axis=0)
    if len(rows) > 1 and tops.max() > DIFFERENT_SCALES * tops.min():
        return rows.min(axis=0), rows.max(axis=0)
    low, high = float(rows.min()), float(rows.max())
    return -_round_up(-low, high), _round_up(high, low)


def _is_usual(rows: np.ndarray[Any, np.dtype[Any]]) -> bool:
    mean, deviation = rows.mean(), rows.std()
    least, most = USUAL_DEVIATIONS
    return bool(rows.min() == rows.max() or (least < deviation < most and abs(mean) < deviation))


def _round_up(bound: float, other: float) -> float:
    """The next power of two above an upper bound, whose other bound decides whether it is near zero."""
    if bound == 0 or abs(bound) * NEAR_ZERO < abs(other):
        return 0.0
    return math.copysign(2.0 ** (math.ceil if bound > 0 else math.floor)(math.log2(abs(bound))), bound)


@dataclass(frozen=True, eq=False, kw_only=True)
class ExportSpec:
    """A module in evaluation mode and float32, its graphs, and what the manifest states about it.

    Attributes:
        module: Its weights are counted and exported.
        signatures: One for each graph.
        description: One line.
        identity: What the artifact depends on beside the module's class, weights and description.
        tolerances: The usual ones.
        config: The attention configuration; empty for non-attention modules.
        num_heads: 0 if unknown, as for non-attention modules.
        cost: Floating-point operations; all 0 if unknown.
        tokenizer: For modules that take text.
        encoder: For text encoders.
        classifier: For text classifiers and rerankers.
        long_cases: Sizes beyond the parity grid, and what the plain graph must compute for them.
        compares_special_values: Whether zeros, equal rows and large values are compared too.
        branches: Places of branches on values that the caller accepts as they were traced.
        notes: What the parity report says beside its figures.
        file: Of an ONNX file that exists already.
    """

    module: nn.Module
    signatures: tuple[Signature, ...]
    description: str
    identity: Mapping[str, object] = field(default_factory=dict)
    tolerances: Mapping[Precision, Tolerance] = field(default_factory=lambda: TOLERANCES)
    config: Mapping[str, Any] = field(default_factory=dict)
    num_heads: int = 0
    causal: bool = False
    cost: Cost = UNKNOWN_COST
    tokenizer: Tokenizer | None = None
    encoder: EncoderFacts | None = None
    texts: Sequence[GoldenCase] = ()
    reference: str = ""
    classifier: ClassifierFacts | None = None
    long_cases: Sequence[tuple[Mapping[str, int], GoldenCase]] = ()
    compares_special_values: bool = False
    branches: Sequence[str] = ()
    notes: Sequence[str] = ()
    file: "FileFacts | None" = None


@dataclass(frozen=True, eq=False, kw_only=True)
class FileFacts:
    """What an ONNX file that exists already brings along.

    Attributes:
        graphs: By kind, in place of traced ones.
        golden: By kind, the cases that the judge has computed.
        judge: What the golden vectors are of, in place of eager PyTorch.
        parameters: Number of elements of its weights.
        activation_scales: As in the manifest.
    """

    graphs: Mapping[GraphKind, onnx.ModelProto]
    golden: Mapping[GraphKind, Sequence[GoldenCase]]
    judge: str
    parameters: int
    activation_scales: Literal["row", "fixed"] | None


def attention_spec(module: AttentionModule, description: str = "") -> ExportSpec:
    """The export of an attention module, with all graphs."""
    config, tokenizer = module.config, module.tokenizer if isinstance(module, TextAttention) else None
    config_fields = asdict(config)
    return ExportSpec(
        module=module.eval(),
        signatures=signatures(module),
        description=description,
        identity={"config": config_fields, "tokenizer": tokenizer.to_str() if tokenizer is not None else ""},
        config=config_fields,
        num_heads=config.num_heads,
        causal=config.causal,
        cost=Cost(
            flops_per_query=config.flops_per_query,
            flops_per_key=config.flops_per_key,
            flops_per_pair=config.flops_per_pair,
        ),
        tokenizer=tokenizer,
    )


def signatures(module: AttentionModule) -> tuple[Signature, ...]:
    """The signatures of all graphs of an attention module."""
    if isinstance(module, TextAttention):
        return tuple(_signature(module, kind) for kind in TEXT_ATTENTION_GRAPHS)
    of_contexts = (_context_signature(module.config, kind) for kind in OF_CONTEXTS)
    return (*(_signature(module, kind) for kind in TEXT_ATTENTION_GRAPHS), *of_contexts)


def _context_signature(config: AttentionConfig, kind: GraphKind) -> Signature:
    """The signature of a graph of stored contexts."""
    widths = zip(PROJECTED, (config.d_k, config.d_v), strict=True)
    context = [tensor(name, "float32", BATCH_AXIS, config.num_kv_heads, KEY_AXIS, d) for name, d in widths]
    key_positions = tensor(KEY_POSITIONS, "int64", BATCH_AXIS, KEY_AXIS)
    if kind is GraphKind.PROJECT:
        inputs = [tensor("key", "float32", BATCH_AXIS, KEY_AXIS, config.d_key)]
        if config.separate_value:
            inputs.append(tensor("value", "float32", BATCH_AXIS, KEY_AXIS, config.d_value))
        if config.rotary_theta:
            inputs.append(key_positions)
        return Signature(kind=kind, inputs=tuple(inputs), outputs=tuple(context), method="project")
    has_rules = bool(config.causal or config.window or config.alibi)
    inputs = [tensor("query", "float32", BATCH_AXIS, QUERY_AXIS, config.d_query)]
    if has_rules or config.rotary_theta:
        inputs.append(tensor(POSITIONS, "int64", BATCH_AXIS, QUERY_AXIS))
    inputs += [*context, key_positions] if has_rules else context
    outputs = [tensor("context_vectors", "float32", BATCH_AXIS, QUERY_AXIS, config.d_out)]
    if kind is GraphKind.CONTEXT_WEIGHTS:
        inputs.append(tensor(ATTENTION_MASK, "bool", BATCH_AXIS, MASK_HEADS_AXIS, QUERY_AXIS, KEY_AXIS))
        axes = (BATCH_AXIS, config.num_heads, QUERY_AXIS, KEY_AXIS)
        outputs.append(tensor("attention_weights", "float32", *axes))
    return Signature(
        kind=kind,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        options={"return_weights": True} if kind is GraphKind.CONTEXT_WEIGHTS else {},
        method="attend",
        key_axis=KEY_AXIS,
        num_heads=config.num_heads,
    )


def _signature(module: AttentionModule, kind: GraphKind) -> Signature:
    config = module.config
    key_axis = KEY_AXIS if config.cross else QUERY_AXIS
    inputs = _own_inputs(module)
    outputs = [tensor("context_vectors", "float32", BATCH_AXIS, QUERY_AXIS, config.d_out)]
    if kind is GraphKind.LENGTHS:
        inputs.append(tensor(KEY_LENGTHS, "int64", BATCH_AXIS))
    if kind in (GraphKind.MASK, GraphKind.WEIGHTS, GraphKind.MASK_BLOCKS):
        inputs.append(tensor(ATTENTION_MASK, "bool", BATCH_AXIS, MASK_HEADS_AXIS, QUERY_AXIS, key_axis))
    if kind in IN_BLOCKS.values():
        inputs.append(tensor(BLOCK_ROWS, "int64"))
    if kind is GraphKind.WEIGHTS:
        axes = (BATCH_AXIS, config.num_heads, QUERY_AXIS, key_axis)
        outputs.append(tensor("attention_weights", "float32", *axes))
    return Signature(
        kind=kind,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        options={"return_weights": True} if kind is GraphKind.WEIGHTS else {},
        key_axis=key_axis,
        num_heads=config.num_heads,
    )


def _own_inputs(module: AttentionModule) -> list[TensorSpec]:
    config = module.config
    if isinstance(module, TextAttention):
        vocabulary = module.embedding.num_embeddings
        inputs = [tensor("token_ids", "int64", BATCH_AXIS, QUERY_AXIS, exclusive_upper_bound=vocabulary)]
    else:
        inputs = [tensor("query", "float32", BATCH_AXIS, QUERY_AXIS, config.d_query)]
    if config.cross:
        inputs.append(tensor("key", "float32", BATCH_AXIS, KEY_AXIS, config.d_key))
    if config.separate_value:
        inputs.append(tensor("value", "float32", BATCH_AXIS, KEY_AXIS, config.d_value))
    if config.rotary_theta:
        inputs.append(tensor(POSITIONS, "int64", BATCH_AXIS, QUERY_AXIS))
    return inputs


def tensor(
    name: str, data_type: str, *axes: str | int, exclusive_upper_bound: IdBound | None = None
) -> TensorSpec:
    """A tensor by its name, NumPy type name and axes; ids also by their exclusive upper bound."""
    values = {"name": name, "data_type": data_type, "axes": axes}
    return TensorSpec.model_validate(values | {"exclusive_upper_bound": exclusive_upper_bound})


class PositionalModule(nn.Module):
    """Calls a module with the tensors of one signature by position. Returns its outputs as a tuple."""

    def __init__(self, module: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.module = module
        self.names = [spec.name for spec in signature.module_inputs]
        self.options = dict(signature.options)

    # The tracer orders operators by the name of this parameter: another name gives other bytes.
    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Calls the module."""
        outputs = self.module(**dict(zip(self.names, tensors, strict=True)), **self.options)
        return output_tensors(outputs)


class _MethodOf(nn.Module):
    """A method of a module as a module."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, **inputs: Any) -> Any:
        """Calls the method."""
        return getattr(self.module, self.method)(**inputs)


def output_tensors(outputs: Any) -> tuple[Tensor, ...]:
    """The outputs of a module as a tuple; see `named_outputs`.

    Real numbers of any precision become float32, and integers int64.

    Raises:
        TypeError: An output is not a tensor.
    """
    return tuple(map(_with_served_type, named_outputs(outputs)[0].values()))


def _with_served_type(output: Tensor) -> Tensor:
    if output.is_floating_point():
        return output.float()
    return output if output.dtype is torch.bool or output.is_complex() else output.long()


def named_outputs(outputs: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The outputs of a module by their path, such as `scores.left`, and the paths of caches, left out.

    Args:
        outputs: A tensor, or a sequence, mapping or dataclass of outputs. None is skipped.

    Raises:
        TypeError: An output is not a tensor, or there is none.
    """
    tensors, caches = dict[str, Tensor](), list[str]()
    for path, output in _leaves(outputs, ()):
        name = ".".join(path)
        if CACHE_FIELD in path or type(output).__name__.endswith("Cache"):
            caches.append(name)
        elif isinstance(output, Tensor):
            tensors[name] = output
        else:
            raise TypeError(f"the module returns {type(output).__name__}; outputs must be tensors")
    if not tensors:
        raise TypeError("the module returns no tensor")
    return tensors, list(dict.fromkeys(caches))


def _leaves(output: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    parts: Iterable[tuple[object, Any]]
    if isinstance(output, Mapping):
        parts = output.items()
    elif is_dataclass(output):
        parts = ((part.name, getattr(output, part.name)) for part in fields(output))
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        parts = zip(output._fields, output, strict=True)
    elif isinstance(output, Sequence) and not isinstance(output, str):
        parts = enumerate(output)
    else:
        if output is not None:
            yield path, output
        return
    for name, part in parts:
        if name == CACHE_FIELD and part is not None:
            yield (*path, CACHE_FIELD), part
        else:
            yield from _leaves(part, (*path, str(name)))


@contextmanager
def without_fused_layers() -> Iterator[None]:
    """Makes PyTorch's transformer layers compute with the operators of their own code while the block runs.

    Otherwise a fused operator may take their place, which the exporter does not know, and which returns zeros
    for rows that a mask hides.
    """
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)


class StandardViews(TorchFunctionMode):
    """Computes `view` as `reshape` where the memory of a tensor does not allow it.

    The operators of PyTorch's layers return other strides than the fused ones do.

    Attributes:
        is_needed: Whether a module has such a tensor.
    """

    is_needed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator."""
        if func is not Tensor.view or isinstance(args[-1], torch.dtype) or kwargs:
            return func(*args, **(kwargs or {}))
        if torch.compiler.is_exporting():
            return Tensor.reshape(*args)
        try:
            return func(*args)
        except RuntimeError:
            self.is_needed = True
            return Tensor.reshape(*args)


def call_eager(module: nn.Module, signature: Signature, inputs: Arrays) -> tuple[Tensor, ...]:
    """Calls the module in eager PyTorch with arrays by name. Returns tensors in the order of the outputs."""
    tensors = [torch.from_numpy(inputs[spec.name]) for spec in signature.module_inputs]
    with torch.inference_mode(), without_fused_layers():
        outputs: tuple[Tensor, ...] = PositionalModule(signature.part_of(module), signature)(*tensors)
    return outputs


def run_eager(module: nn.Module, signature: Signature, inputs: Arrays) -> Arrays:
    """Runs the module in eager PyTorch: from arrays by name to arrays by name.

    Raises:
        ExportError: An output has another shape than its axes say.
    """
    return arrays_by_name(signature, inputs, call_eager(module, signature, inputs))


def sizes_of(specs: Iterable[TensorSpec], arrays: Arrays) -> dict[str, int]:
    """The sizes of the symbolic axes of arrays by name."""
    pairs = (pair for s in specs for pair in zip(s.axes, arrays[s.name].shape, strict=True))
    return {axis: size for axis, size in pairs if isinstance(axis, str)}


def shapes_of(arrays: Mapping[str, Tensor] | Arrays) -> str:
    """The names and shapes of inputs, as messages list them."""
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


def arrays_by_name(signature: Signature, inputs: Arrays, outputs: Sequence[Tensor]) -> Arrays:
    """The outputs by name, whose shapes must be those of their axes.

    Raises:
        ExportError: One has another shape.
    """
    sizes = all_sizes(sizes_of(signature.inputs, inputs), signature.derived_axes)
    for spec, output in zip(signature.outputs, outputs, strict=True):
        shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes)
        if output.shape != shape:
            raise ExportError(
                f"output {spec.name!r} has the shape {list(output.shape)} for {shapes_of(inputs)}; by its "
                f"axes at other lengths, {spec.axes}, it would be {list(shape)}. The size of an axis must be "
                f"fixed, that of an axis of an input, or follow from one of these in the same way for all "
                f"lengths"
            )
    return {spec.name: output.numpy() for spec, output in zip(signature.outputs, outputs, strict=True)}


def random_inputs(signature: Signature, sizes: Mapping[str, int], rng: np.random.Generator) -> Arrays:
    """Inputs of a graph for the given sizes of its symbolic axes, and of its blocks if it has them.

    Vectors are standard normal, or in the range of examples; masks and lengths are random. In a batch of
    several sequences the first has the smallest key length, or may attend to nothing. The first row of a
    single sequence of several rows may attend to nothing.
    """
    arrays: Arrays = {}
    for spec in signature.inputs:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes]
        if spec.name == BLOCK_ROWS:
            arrays[spec.name] = np.array(sizes[BLOCK_ROWS])
        elif spec.name in (KEY_LENGTHS, QUERY_LENGTHS, *signature.lengths):
            axis = signature.axis_of_lengths(spec.name)
            least = signature.min_lengths.get(axis, 1)
            arrays[spec.name] = rng.integers(least, sizes[axis], shape, endpoint=True)
            if sizes[BATCH_AXIS] > 1:
                arrays[spec.name][0] = signature.least_key_length and least
        elif spec.name == ATTENTION_MASK:
            arrays[spec.name] = rng.random(shape) < 0.7  # noqa: PLR2004 - most pairs may attend
            if signature.least_key_length:
                arrays[spec.name][..., 0] = True
            elif sizes[BATCH_AXIS] > 1:
                arrays[spec.name][0] = False
            elif sizes[QUERY_AXIS] > 1:
                arrays[spec.name][:, :, 0] = False
        else:
            positions = MAX_POSITION if signature.method == "forward" else sizes.get(KEY_AXIS, 0) + 1
            drawn = signature.ranges.get(spec.name)
            arrays[spec.name] = (
                drawn.draw(shape, rng) if drawn else _random_values(spec, shape, rng, positions)
            )
            if spec.name in signature.flags:  # a mask, whatever it means, hides some rows and not all
                arrays[spec.name][..., 0] = signature.flags[spec.name]
                arrays[spec.name][..., 1:2] = not signature.flags[spec.name]
    return arrays


def _random_values(
    spec: TensorSpec, shape: list[int], rng: np.random.Generator, positions: int
) -> np.ndarray[Any, np.dtype[Any]]:
    if spec.data_type == "int64":
        return rng.integers(spec.exclusive_upper_bound or positions, size=shape)
    if spec.data_type == "bool":
        return rng.random(shape) < 0.5  # noqa: PLR2004 - either
    return rng.standard_normal(shape, dtype=np.float32)
