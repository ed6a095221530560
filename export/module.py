"""The signatures of any module with (batch, sequence, ...) inputs, from examples and names of axes."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from artifact.manifest import (
    ATTENTION_MASK,
    BATCH_AXIS,
    KEY_LENGTHS,
    POSITIONS,
    GraphKind,
    TensorSpec,
)
from artifact.tolerance import Tolerance
from export.key_mask import MASK_DIMENSIONS, KeyLengthsToMask
from export.max_length import MaxLength, find_max_lengths
from export.probe import DATA_TYPES, check_independence, check_lengths, check_padding, find_outputs
from export.signature import MAX_SEQUENCE_AXES, Signature, tensor
from export.spec import ExportSpec

DynamicAxes = Mapping[str, Mapping[int, str]]
# Requests give these names a meaning of their own.
RESERVED = frozenset({ATTENTION_MASK, KEY_LENGTHS, POSITIONS, "text", "lengths"})


@dataclass(frozen=True, kw_only=True)
class ModuleInputs:
    """The inputs of a module.

    Attributes:
        tensors: Without the attention mask.
        mask_type: Element type of the attention mask that the module takes; None if it takes none.
        max_lengths: By sequence axis, the largest number of rows.
    """

    tensors: tuple[TensorSpec, ...]
    mask_type: torch.dtype | None
    max_lengths: Mapping[str, int]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        example_inputs: Mapping[str, Tensor] | Sequence[Tensor],
        dynamic_axes: DynamicAxes,
        max_length: MaxLength,
    ) -> Self:
        """Reads the arguments of `export_module`.

        Raises:
            ValueError: They do not fit each other or the module.
        """
        examples = _by_name(module, example_inputs)
        if unknown := sorted(set(dynamic_axes) - set(examples)):
            known = ", ".join(examples)
            raise ValueError(f"dynamic_axes[{unknown[0]!r}]: not an input; the inputs are {known}")
        specs = [_input(name, example, dynamic_axes) for name, example in examples.items()]
        mask = next((spec for spec in specs if spec.name == ATTENTION_MASK), None)
        tensors = tuple(spec for spec in specs if spec is not mask)
        axes = list(dict.fromkeys(str(spec.axes[1]) for spec in specs))
        if len(axes) > MAX_SEQUENCE_AXES:
            raise ValueError(
                f"dynamic_axes: {len(axes)} sequence axes ({', '.join(axes)}); at most {MAX_SEQUENCE_AXES} "
                f"are supported: inputs of the same length can share the name of their axis"
            )
        if mask is not None and (not tensors or len(axes) > 1):
            raise ValueError(
                f"{ATTENTION_MASK} (batch, {mask.axes[1]}): its module must have another input, and all "
                f"inputs must share one sequence axis; found {', '.join(axes)}"
            )
        return cls(
            tensors=tensors,
            mask_type=None if mask is None else examples[ATTENTION_MASK].dtype,
            max_lengths=find_max_lengths(module, axes, max_length),
        )


def module_spec(
    module: nn.Module, inputs: ModuleInputs, output_names: Sequence[str], tolerance: Tolerance
) -> ExportSpec:
    """The export of a module: its signatures, checked by runs in eager PyTorch.

    Args:
        module: Put into evaluation mode.
        inputs: Its inputs.
        output_names: The names of its outputs.
        tolerance: Largest accepted difference between a sequence alone and in a batch.

    Raises:
        ValueError: The module does not run on its inputs, its outputs are not as named, it mixes the
            sequences of a batch, or its result depends on rows that `attention_mask` hides.
    """
    module.eval()
    if inputs.mask_type is not None:
        module = KeyLengthsToMask(module, rows=inputs.tensors[0].name, dtype=inputs.mask_type)
    plain = Signature(kind=GraphKind.PLAIN, inputs=inputs.tensors, outputs=(), max_lengths=inputs.max_lengths)
    plain = replace(plain, outputs=find_outputs(module, plain, output_names))
    check_lengths(module, plain)
    check_independence(module, plain, tolerance)
    signatures = [plain]
    if inputs.mask_type is not None:
        lengths = _with_lengths(plain)
        check_padding(module, lengths, tolerance)
        signatures.append(lengths)
    return ExportSpec(module=module, signatures=tuple(signatures), max_lengths=inputs.max_lengths)


def _with_lengths(plain: Signature) -> Signature:
    return replace(
        plain,
        kind=GraphKind.LENGTHS,
        inputs=(*plain.inputs, tensor(KEY_LENGTHS, "int64", BATCH_AXIS)),
        key_axis=plain.sequence_axes[0],
        least_key_length=1,
    )


def _by_name(module: nn.Module, examples: Mapping[str, Tensor] | Sequence[Tensor]) -> dict[str, Tensor]:
    parameters = inspect.signature(module.forward).parameters
    if isinstance(examples, Tensor):
        raise ValueError("example_inputs: give tensors by name, or a sequence of them")  # noqa: TRY004
    if not isinstance(examples, Mapping):
        if len(examples) > len(parameters):
            raise ValueError(f"{len(examples)} example_inputs; forward takes {', '.join(parameters)}")
        examples = dict(zip(parameters, examples, strict=False))
    required = [name for name, parameter in parameters.items() if _is_required(parameter)]
    if not examples or set(examples) - set(parameters) or set(required) - set(examples):
        raise ValueError(f"example_inputs={list(examples)}: forward takes {', '.join(parameters)}")
    reserved = sorted(name for name in set(examples) & RESERVED if not _is_key_mask(name, examples[name]))
    if reserved:
        raise ValueError(
            f"example_inputs: {', '.join(reserved)} has a meaning of its own in requests; rename the "
            f"parameter (only {ATTENTION_MASK} of shape (batch, sequence) is taken as a mask of keys)"
        )
    return dict(examples)


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic


def _is_key_mask(name: str, example: Tensor) -> bool:
    return name == ATTENTION_MASK and example.ndim == MASK_DIMENSIONS


def _input(name: str, example: Tensor, dynamic_axes: DynamicAxes) -> TensorSpec:
    if example.dtype not in DATA_TYPES:
        known = ", ".join(DATA_TYPES.values())
        raise ValueError(f"example_inputs[{name!r}] is {example.dtype}; an input is one of {known}")
    named = dynamic_axes.get(name, {})
    if (
        named.get(0) != BATCH_AXIS
        or set(named) != {0, 1}
        or named[1] == BATCH_AXIS
        or example.ndim < len(named)
    ):
        raise ValueError(
            f"dynamic_axes[{name!r}]={dict(named)}: must name axis 0 {BATCH_AXIS!r} and axis 1 the sequence"
        )
    shape = (BATCH_AXIS, named[1], *example.shape[2:])
    return tensor(name, DATA_TYPES[example.dtype], *shape, exclusive_upper_bound=_id_bound(name, example))


def _id_bound(name: str, example: Tensor) -> int | None:
    """For ids, one above the largest of the example."""
    if example.dtype != torch.int64:
        return None
    if example.numel() == 0 or example.min() < 0:
        raise ValueError(f"example_inputs[{name!r}]: give at least one id, and none below 0")
    return int(example.max()) + 1
