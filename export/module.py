"""The signatures of any module with (batch, sequence, ...) inputs, from examples and names of axes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from attention_serving.artifact.manifest import (
    ATTENTION_MASK,
    BATCH_AXIS,
    BLOCK_ROWS,
    KEY_LENGTHS,
    POSITIONS,
    QUERY_LENGTHS,
    GraphKind,
    TensorSpec,
    sequence_axes,
)
from attention_serving.artifact.names import NAME_PATTERN
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.adapted import (
    ATTENDING,
    KEY_PADDING,
    LENGTHS_OF,
    AdaptedModule,
    Mask,
    Meaning,
    is_mask_name,
)
from attention_serving.export.axes import Understanding, understand
from attention_serving.export.errors import ExportError
from attention_serving.export.parity import LONGEST
from attention_serving.export.precision import TOLERANCES, Precision
from attention_serving.export.probe import (
    DATA_TYPES,
    NotANumberError,
    check_independence,
    check_repeatable,
    fast_path_notes,
    find_largest_lengths,
    find_least_lengths,
    find_outputs,
    output_magnitude,
    output_precision,
    output_scale,
)
from attention_serving.export.probe_masks import can_be_padded, check_masks, check_pairs, equal_without_masks
from attention_serving.export.signature import (
    MASK_HEADS_AXIS,
    MAX_SEQUENCE_AXES,
    ExportSpec,
    IdBound,
    Signature,
    ValueRange,
    tensor,
)
from attention_serving.export.source import (
    Examples,
    are_positional,
    copy_module,
    copy_state,
    forward_parameters,
    name_inputs,
    to_float32,
)

DynamicAxes = Mapping[str, Mapping[int, str]]
# Requests give these names a meaning of their own.
RESERVED = frozenset(
    {ATTENTION_MASK, KEY_LENGTHS, QUERY_LENGTHS, POSITIONS, BLOCK_ROWS, "text", "text_pair", "lengths"}
)
# Such as the global_attention_mask of Longformer, which hides nothing.
GLOBAL = "global_"
# Axes of a matrix, such as (batch, sequence) and (query, key).
MATRIX_AXES = 2
# Attributes by which configurations of other projects state it, such as those of Hugging Face models.
CONFIG_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
MaxLength = int | Mapping[str, int] | None
AS_TRACED = "as traced"
CAUSAL_ADVICE = "pass is_causal=False to PyTorch's own layers; "


@dataclass(frozen=True, kw_only=True)
class ModuleInputs:
    """The inputs of a module.

    Attributes:
        tensors: Those of its graphs, without masks.
        masks: What the module takes and its graphs do not.
        parameters: By input, the parameter of the module if its name differs.
        max_lengths: By sequence axis, the largest number of rows.
        stated_lengths: Those of them that the caller stated.
        example_sizes: By sequence axis, the number of rows in the first example.
        ranges: By input, the values that it is tested with; absent if they are standard normal.
        narrow_ranges: The same for every input of real numbers, whatever its examples.
        flags: By input of flags, the first value of the example.
        understanding: What was found by runs of the module.
        positional: The parameters in their order if `forward` takes them by position.
    """

    tensors: tuple[TensorSpec, ...]
    masks: tuple[Mask, ...]
    parameters: Mapping[str, str]
    max_lengths: Mapping[str, int]
    stated_lengths: Mapping[str, int]
    example_sizes: Mapping[str, int]
    ranges: Mapping[str, ValueRange]
    narrow_ranges: Mapping[str, ValueRange]
    # Not part of the digest of the source, which artifacts of earlier versions record.
    flags: Mapping[str, bool] = field(repr=False)
    understanding: Understanding = field(repr=False)
    positional: tuple[str, ...] = field(repr=False, default=())

    @classmethod
    def of(
        cls,
        module: nn.Module,
        example_inputs: Examples,
        dynamic_axes: DynamicAxes | None,
        max_length: MaxLength,
        masks: Mapping[str, str | None] | None = None,
        inputs: Mapping[str, str] | None = None,
        further_examples: Sequence[Examples] = (),
    ) -> Self:
        """Reads the arguments of `export_module`, and finds what they leave out by runs of the module.

        Raises:
            ValueError: They do not fit each other or the module.
        """
        examples = _to_float32(name_inputs(module, example_inputs))
        all_examples = _all_examples(module, examples, further_examples)
        renamed, dynamic_axes = dict(inputs or {}), dynamic_axes or {}
        meanings: Mapping[str, str | None] = dict(masks or {})
        for argument, names in (("dynamic_axes", dynamic_axes), ("masks", meanings), ("inputs", renamed)):
            if unknown := sorted(set(names) - set(examples)):
                raise ValueError(
                    f"{argument}[{unknown[0]!r}]: not an input; the inputs are {', '.join(examples)}"
                )
        for name, axes_of_input in dynamic_axes.items():
            if not isinstance(axes_of_input, Mapping):
                raise ValueError(  # noqa: TRY004 - as for all other arguments
                    f"dynamic_axes[{name!r}]={axes_of_input!r}: must be a mapping such as "
                    f"{{0: 'batch', 1: 'sequence'}}"
                )
        positional = are_positional(module, [*examples])
        understanding = understand(
            copy_state(module), all_examples, dynamic_axes, meanings, positional=positional
        )
        meanings, batch_second = understanding.masks, understanding.batch_second
        dynamic_axes = {
            name: {
                1 - at if name in batch_second and at < MATRIX_AXES else at: axis for at, axis in axes.items()
            }
            for name, axes in understanding.axes.items()
        }
        for name in batch_second:
            all_examples[name] = [values.transpose(0, 1) for values in all_examples[name]]
        examples = {name: values[0] for name, values in all_examples.items()}
        candidates = [
            _mask(name, example, dynamic_axes.get(name, {}), meanings) for name, example in examples.items()
        ]
        mask_inputs = tuple(mask for mask in candidates if mask is not None)
        mask_names = {mask.name for mask in mask_inputs}
        names = {name: renamed.get(name, name) for name in examples if name not in mask_names}
        _check_names(names)
        tensors = tuple(
            _input(name, all_examples[name], dynamic_axes, names[name], understanding.id_bounds.get(name))
            for name in names
        )
        axes = list(dict.fromkeys(sequence_axes(tensors)))
        if len(axes) > MAX_SEQUENCE_AXES:
            raise ValueError(
                f"dynamic_axes: {len(axes)} sequence axes ({', '.join(axes)}); at most {MAX_SEQUENCE_AXES} "
                f"are supported: inputs of the same length can share the name of their axis"
            )
        _check_masks(mask_inputs, axes)
        max_lengths = find_max_lengths(module, axes, max_length)
        ranges = [
            {
                served: drawn
                for (name, served), spec in zip(names.items(), tensors, strict=True)
                if examples[name].is_floating_point()
                and (drawn := ValueRange.of(all_examples[name], spec.axes, usual=usual)) is not None
            }
            for usual in (True, False)
        ]
        return cls(
            tensors=tensors,
            masks=mask_inputs,
            parameters={served: name for name, served in names.items() if served != name},
            max_lengths=max_lengths,
            stated_lengths={} if max_length is None else max_lengths,
            example_sizes={
                spec.length_axis: examples[name].shape[1]
                for spec, name in reversed([*zip(tensors, names, strict=True)])
                if isinstance(spec.length_axis, str)
            },
            ranges=ranges[0],
            narrow_ranges=ranges[1],
            flags={
                served: bool(examples[name].flatten()[0])
                for (name, served), spec in zip(names.items(), tensors, strict=True)
                if isinstance(spec.axes[-1], str)
                and len(spec.axes) > 1
                and (spec.data_type == "bool" or spec.exclusive_upper_bound == len((False, True)))
            },
            understanding=understanding,
            positional=tuple(examples) if positional else (),
        )

    def output_names(self, dynamic_axes: DynamicAxes) -> Sequence[str]:
        """Names of the outputs. If the caller gives all axes, a single output is the context vectors."""
        names = self.understanding.output_names
        is_single = len(names) == 1 and set(dynamic_axes) == set(self.understanding.axes)
        return ("context_vectors",) if is_single else names

    def describe(self, output_names: Sequence[str]) -> str:
        """The arguments of `export_module` that say what was understood, and notes."""
        return str(replace(self.understanding, output_names=output_names))

    @contextmanager
    def advise_masks(self) -> Iterator[None]:
        """Ends an ExportError of the block with the inputs that could be masks.

        Any values of such an input are tried: a module need not define a result if it hides all rows.
        """
        try:
            yield
        except ExportError as error:
            if self.understanding.flags:
                error.args = (". ".join([f"{error}. Perhaps an input is a mask", *self.understanding.flags]),)
            raise

    def shortened(self) -> Self:
        """The same inputs, of short sequences."""
        largest = {
            axis: min(self.max_lengths.get(axis, LONGEST), LONGEST) for axis in sequence_axes(self.tensors)
        }
        return replace(self, max_lengths=largest)

    @property
    def lengths(self) -> dict[str, str]:
        """By sequence axis that has a mask of keys, the input that holds its lengths.

        Raises:
            ValueError: An axis has the name that requests give another one.
        """
        axes = sequence_axes(self.tensors)
        names = dict(zip(axes[:1] + axes[-1:], (QUERY_LENGTHS, KEY_LENGTHS), strict=False))
        masked = [mask.sequence_axes[0] for mask in self.masks if len(mask.sequence_axes) == 1]
        lengths = {axis: names.get(axis, f"{axis}_lengths") for axis in masked}
        inputs = {spec.name for spec in self.tensors}
        for axis, name in lengths.items():
            if name in inputs or (axis not in names and name in names.values()):
                raise ValueError(f"axis {axis!r}: {name} is another input of requests; rename the axis")
        return lengths

    def adapted(self, module: nn.Module) -> AdaptedModule:
        """The module as its graphs call it."""
        rows = {
            spec.length_axis: spec.name
            for spec in reversed(self.tensors)
            if isinstance(spec.length_axis, str)
        }
        return AdaptedModule(
            module,
            rows=rows,
            lengths=self.lengths,
            masks=self.masks,
            parameters=self.parameters,
            batch_second=self.understanding.batch_second,
            output_axes=self.understanding.output_axes,
            positional=self.positional,
        )


def read_inputs(
    module: nn.Module,
    example: Examples,
    dynamic_axes: DynamicAxes | None,
    max_length: MaxLength,
    masks: Mapping[str, str | None] | None,
    inputs: Mapping[str, str] | None,
    examples: Sequence[Examples],
) -> tuple[nn.Module, ModuleInputs, list[str]]:
    """The module to export, which is a copy, its inputs, and notes on both.

    Raises:
        ValueError: The arguments do not fit each other or the module, or it cannot be copied.
    """
    source, notes = copy_module(module, example)
    module_inputs = ModuleInputs.of(source, example, dynamic_axes, max_length, masks, inputs, examples)
    for spec in module_inputs.tensors:
        name = module_inputs.parameters.get(spec.name, spec.name)
        if spec.data_type == "int64" and name not in module_inputs.understanding.id_bounds:
            advice = "give larger ones in examples=[...]"
            if len(spec.axes) == 1:
                advice += f", or state masks={{{name!r}: '{LENGTHS_OF}AXIS'}} if they are lengths"
            notes.append(
                f"input {spec.name}: integers below {spec.exclusive_upper_bound}, as in the example; {advice}"
            )
    return source, module_inputs, notes


def module_spec(
    module: nn.Module,
    inputs: ModuleInputs,
    output_names: Sequence[str],
    description: str,
    tolerance: Tolerance | None,
    branches: str | None = None,
    precision: Precision = Precision.FP32,
    *,
    runs_alone: bool = False,
) -> ExportSpec:
    """The export of a module: its signatures, checked by runs in eager PyTorch.

    Args:
        module: Put into evaluation mode.
        inputs: Its inputs.
        output_names: The names of its outputs.
        description: One line.
        tolerance: Largest accepted difference between a sequence alone and in a batch. Default: that of
            float32, multiplied by the magnitude of the outputs.
        branches: `AS_TRACED` if branches on values of inputs are accepted; None to refuse them.
        precision: That of the module, if it is an ONNX file.
        runs_alone: Whether servers run each sequence alone, so that others cannot change its result.

    Raises:
        ValueError: The module does not run on its inputs, or its outputs are not as named.
        ExportError: It is random, mixes the sequences of a batch, or its result depends on rows that a mask
            hides; or it branches on values of its inputs.
    """
    adapted = inputs.adapted(module.eval())
    plain = Signature(
        kind=GraphKind.PLAIN,
        inputs=inputs.tensors,
        outputs=(),
        key_axis=next(reversed(sequence_axes(inputs.tensors)), ""),
        least_key_length=1,
        max_lengths=inputs.max_lengths,
        ranges=inputs.ranges,
        flags=inputs.flags,
        lengths={name: axis for axis, name in inputs.lengths.items()},
    )
    check_repeatable(adapted, plain, inputs.example_sizes)
    try:
        plain = find_least_lengths(adapted, plain, inputs.example_sizes)
    except NotANumberError:  # standard normal values are not what the module takes
        plain = replace(plain, ranges=inputs.narrow_ranges)
        plain = find_least_lengths(adapted, plain, inputs.example_sizes)
    plain = find_outputs(adapted, plain, output_names)
    plain, long_cases = find_largest_lengths(adapted, plain, inputs.stated_lengths)
    scale = output_scale(adapted, plain, long_cases)
    tolerances = {precision: usual.scaled(scale) for precision, usual in TOLERANCES.items()}
    if (rounding := output_precision(adapted, plain)) is not None:
        tolerances[Precision.FP32] = tolerances[rounding]
    if tolerance is None:  # small outputs do not pass by being small
        small = 1.0 if precision is Precision.FP32 else min(1.0, output_magnitude(adapted, plain))
        tolerance = tolerances[precision].scaled(small)
    if not runs_alone:
        check_independence(adapted, plain, tolerance)
    signatures = [plain]
    if inputs.masks:
        without = tuple(replace(mask, optional=_has_default(module, mask.name)) for mask in inputs.masks)
        if equal_without_masks(adapted, without, plain, tolerance):
            adapted.masks = without
    for mask in (mask for mask in inputs.masks if len(mask.sequence_axes) == MATRIX_AXES):  # one at most
        pairs = tensor(ATTENTION_MASK, "bool", BATCH_AXIS, MASK_HEADS_AXIS, *mask.sequence_axes)
        signatures.append(replace(plain, kind=GraphKind.MASK, inputs=(*plain.inputs, pairs)))
        check_pairs(adapted, signatures[-1], tolerance)
    if inputs.lengths:
        lengths = [tensor(name, "int64", BATCH_AXIS) for name in inputs.lengths.values()]
        padded = replace(plain, kind=GraphKind.LENGTHS, inputs=(*plain.inputs, *lengths))
        check_masks(adapted, padded, tolerance)
        tries = () if runs_alone else (padded, *signatures[1:])
        if tries and all(can_be_padded(adapted, signed, tolerance) for signed in tries):
            signatures.append(padded)
    return ExportSpec(
        module=adapted if adapted.is_needed else module,
        signatures=tuple(signatures),
        description=description,
        tolerances=tolerances,
        long_cases=long_cases,
        compares_special_values=True,
        branches=_followed_branches(adapted, branches),
        notes=fast_path_notes(adapted, plain, tolerance),
    )


def _followed_branches(module: AdaptedModule, statement: str | None) -> list[str]:
    """The branches on values of inputs that the caller accepts as they are traced.

    Raises:
        ExportError: There is one, and the caller has not accepted it.
    """
    places = module.calls.of_inputs
    if places and statement is None:
        place, line = next(iter(places.items()))
        inside = f" (decided at {place})" if place.file != line.file else ""
        raise ExportError(
            f"the module branches on the values of its inputs, at {line}{inside}. A graph follows one side: "
            f"compute both and choose with torch.where; {CAUSAL_ADVICE}or pass branches='as traced' if every "
            f"request takes the side that the example takes"
        )
    return [f"{Path(line.file).name}:{line.line}" for line in places.values()]


def _to_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: to_float32(tensor) for name, tensor in tensors.items()}


def _all_examples(
    module: nn.Module,
    examples: Mapping[str, Tensor],
    further: Sequence[Examples],
) -> dict[str, list[Tensor]]:
    """The values of each input in all examples."""
    columns = {name: [example] for name, example in examples.items()}
    for index, values in enumerate(further):
        for name, value in _to_float32(name_inputs(module, values)).items():
            first = columns[name][0] if name in columns else value
            if name not in columns or (value.dtype, value.shape[2:]) != (first.dtype, first.shape[2:]):
                raise ValueError(f"examples[{index}][{name!r}]: differs from example_inputs in type or width")
            columns[name].append(value)
    for name, values in columns.items():
        if any(bool(value.isnan().any()) for value in values):
            raise ValueError(f"example_inputs[{name!r}] contains NaN; give values as requests have them")
    return columns


def _has_default(module: nn.Module, name: str) -> bool:
    parameter = forward_parameters(module).get(name)
    return parameter is not None and parameter.default is None


def _check_names(names: Mapping[str, str]) -> None:
    """Checks the names of inputs in requests, by parameter of the module."""
    for name, served in names.items():
        if served in RESERVED:
            raise ValueError(
                f"example_inputs: {served} has a meaning of its own in requests; rename the input, such as "
                f"inputs={{{name!r}: 'my_{served}'}}"
            )
        if not re.fullmatch(NAME_PATTERN, served) or list(names.values()).count(served) > 1:
            raise ValueError(f"inputs[{name!r}]={served!r}: must be unique and match {NAME_PATTERN}")


def _mask(
    name: str, example: Tensor, axis_names: Mapping[int, str], meanings: Mapping[str, str | None]
) -> Mask | None:
    """The mask that an input is by its name, its axes or what the caller states; None if it is none."""
    axes = tuple(axis_names.get(at, size) for at, size in enumerate(example.shape))
    lengths = [axis for axis in axes[1:] if isinstance(axis, str)]
    is_mask = axes[:1] == (BATCH_AXIS,) and (axes[-1:] == tuple(lengths) or axes[-2:] == tuple(lengths))
    is_usual_name = name.endswith((KEY_PADDING, ATTENDING)) and example.ndim == MATRIX_AXES
    is_usual_name = is_usual_name and not name.startswith(GLOBAL)
    if name in meanings:
        if (statement := meanings[name]) is None:
            return None
        if statement.startswith(LENGTHS_OF) and example.dtype is torch.int64 and example.ndim == 1:
            lengths_axes = (BATCH_AXIS, statement.removeprefix(LENGTHS_OF))
            return Mask(name=name, axes=lengths_axes, dtype=example.dtype, meaning=Meaning.LENGTHS)
        if statement not in {Meaning.HIDES, Meaning.ATTENDS, Meaning.ADDED}:
            raise ValueError(
                f"masks[{name!r}]={statement!r}: must be None, '{Meaning.HIDES}', '{Meaning.ATTENDS}', "
                f"'{Meaning.ADDED}', or '{LENGTHS_OF}' and a sequence axis, of integers ('{BATCH_AXIS}',)"
            )
        if not is_mask:
            raise ValueError(
                f"masks[{name!r}]: dynamic_axes[{name!r}]={dict(axis_names)} must name axis 0 "
                f"{BATCH_AXIS!r}, the last axis, and the axis before it if it has a row for each query; its "
                f"shape is {tuple(example.shape)}"
            )
        return Mask(name=name, axes=axes, dtype=example.dtype, meaning=Meaning(statement))
    if not is_mask or not (
        is_usual_name or (is_mask_name(name) and (len(lengths) == MATRIX_AXES or 1 not in axis_names))
    ):
        return None
    meaning = _named_meaning(name, example)
    if meaning is None:
        raise ValueError(
            f"input {name!r} {axes} is a mask; state what it means: masks={{{name!r}: 'True hides'}} as "
            f"nn.MultiheadAttention, or {{{name!r}: 'True attends'}} as scaled_dot_product_attention"
        )
    return Mask(name=name, axes=axes, dtype=example.dtype, meaning=meaning)


def _named_meaning(name: str, example: Tensor) -> Meaning | None:
    if example.is_floating_point() and (example.ndim > MATRIX_AXES or not name.endswith(ATTENDING)):
        return Meaning.ADDED
    if name.endswith(ATTENDING):
        return Meaning.ATTENDS
    return Meaning.HIDES if name.endswith(KEY_PADDING) else None


def _check_masks(masks: Sequence[Mask], axes: Sequence[str]) -> None:
    """Checks that the masks belong to rows of other inputs, and that requests can carry them."""
    for mask in masks:
        if missing := [axis for axis in mask.sequence_axes if axis not in axes]:
            raise ValueError(
                f"{mask.name} {mask.axes}: no other input has the axis {missing[0]!r}; they have "
                f"{', '.join(axes) or 'none'}"
            )
    pairs = [mask.name for mask in masks if len(mask.sequence_axes) == MATRIX_AXES]
    if len(pairs) > 1:
        raise ValueError(f"{', '.join(pairs)}: requests carry one mask of query and key rows; combine them")


def _input(
    name: str, examples: Sequence[Tensor], dynamic_axes: DynamicAxes, served: str, bound: IdBound | None
) -> TensorSpec:
    example = examples[0]
    if example.dtype not in DATA_TYPES:
        types = ", ".join(DATA_TYPES.values())
        raise ValueError(f"example_inputs[{name!r}] is {example.dtype}; an input is one of {types}")
    axis_names = dynamic_axes.get(name, {})
    is_batch = [axis_name == BATCH_AXIS for axis_name in axis_names.values()]
    if axis_names.get(0) != BATCH_AXIS or sum(is_batch) > 1 or example.ndim < 1:
        raise ValueError(_about_axes(name, axis_names))
    if further := sorted(set(axis_names) - {0, 1}):
        raise ValueError(
            f"dynamic_axes[{name!r}]={dict(axis_names)}: axis {further[0]} varies. Only axis 0, the batch, "
            f"and axis 1, the sequence, can vary in an input that is not a mask: leave the axis out, which "
            f"fixes its size at that of the example, or move it to the second place"
        )
    if len(axis_names) > example.ndim:
        raise ValueError(f"dynamic_axes[{name!r}]={dict(axis_names)}: its shape is {tuple(example.shape)}")
    shape = (BATCH_AXIS, *(axis_names.get(at, size) for at, size in enumerate(example.shape[1:], 1)))
    if example.dtype is torch.int64:
        largest = max(_id_bound(name, values) for values in examples)
        is_of_columns = isinstance(bound, tuple) and isinstance(shape[1], int)
        bound = bound if is_of_columns else max(largest, bound if isinstance(bound, int) else 0)
    return tensor(served, DATA_TYPES[example.dtype], *shape, exclusive_upper_bound=bound)


def _about_axes(name: str, axis_names: Mapping[int, str]) -> str:
    """What is wrong with the names of the axes of an input."""
    return (
        f"dynamic_axes[{name!r}]={dict(axis_names)}: name axis 0 {BATCH_AXIS!r} and axis 1 the sequence, as "
        f"{{0: 'batch', 1: 'sequence'}}; or the batch alone if every sequence has the same size"
    )


def _id_bound(name: str, example: Tensor) -> int:
    """One above the largest of the ids of an example."""
    if example.numel() == 0 or example.min() < 0:
        raise ValueError(f"example_inputs[{name!r}]: give at least one id, and none below 0")
    return int(example.max()) + 1


def find_max_lengths(module: nn.Module, axes: Sequence[str], max_length: MaxLength) -> dict[str, int]:
    """The largest length by sequence axis; axes without a limit are absent.

    Args:
        module: Its `config`, if it has one, is read for what the caller does not give.
        axes: The sequence axes of the inputs.
        max_length: One limit for all axes, or limits by axis name; None to take that of `module.config`.

    Raises:
        ValueError: A limit is not an integer of at least 2, or names an axis that does not exist.
    """
    if max_length is None:
        values = (getattr(getattr(module, "config", None), name, None) for name in CONFIG_FIELDS)
        length = next((value for value in values if isinstance(value, int) and value > 1), None)
        return {} if length is None else dict.fromkeys(axes, length)
    limits = dict(max_length) if isinstance(max_length, Mapping) else dict.fromkeys(axes, max_length)
    if unknown := sorted(set(limits) - set(axes)):
        raise ValueError(f"max_length names {', '.join(unknown)}; the sequence axes are {', '.join(axes)}")
    for axis, length in limits.items():
        if isinstance(length, bool) or not isinstance(length, int) or length < 2:  # noqa: PLR2004 - two sizes
            raise ValueError(f"max_length={length!r} of axis {axis!r}: must be an integer of at least 2")
    return limits
