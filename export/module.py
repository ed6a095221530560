"""Exports any module with (batch, sequence, ...) inputs, such as a whole transformer encoder."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace as replace_fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from artifact.manifest import (
    ATTENTION_MASK,
    BATCH_AXIS,
    KEY_LENGTHS,
    POSITIONS,
    GraphKind,
    Manifest,
    TensorSpec,
)
from artifact.tolerance import Tolerance
from export.artifact import Naming, publish
from export.precision import FP32_TOLERANCE, Precision
from export.signature import Signature, call_eager, random_inputs, run_eager, tensor
from export.subject import Subject

DATA_TYPES = {torch.float32: "float32", torch.int64: "int64", torch.bool: "bool"}
DynamicAxes = Mapping[str, Mapping[int, str]]
# What requests call by these names is no input of a module.
RESERVED = frozenset({ATTENTION_MASK, KEY_LENGTHS, POSITIONS, "text", "lengths"})
# Two sets of sizes that share none: an axis of an output is fixed where it keeps its size.
FIRST_SIZES, SECOND_SIZES = (2, 3, 5, 7, 11), (13, 17, 19, 23, 29)


def export_module(
    module: nn.Module,
    example_inputs: Mapping[str, Tensor] | Sequence[Tensor],
    dynamic_axes: DynamicAxes,
    *,
    out: Path | str,
    name: str,
    version: int = 1,
    description: str = "",
    output_names: Sequence[str] = ("context_vectors",),
    precision: Precision = Precision.FP32,
    tolerance: Tolerance | None = None,
    replace: bool = False,
) -> tuple[Path, Manifest]:
    """Exports a module into an artifact that the server serves over both protocols.

    Sequences of different lengths never run together, for the module takes no lengths. The typed API
    carries the first input as the query and the first output as the context vectors; the Open Inference
    Protocol carries all by name.

    Args:
        module: Put into evaluation mode. Takes tensors, gives a tensor or a tuple of tensors. The sequences
            of a batch must not depend on each other.
        example_inputs: By the name of the parameter of `forward`, or in its order. float32, int64 or
            bool; integer inputs are served and tested from 0 to the largest value of their example.
        dynamic_axes: By input name, the symbolic name of each axis of free size; axis 0 is "batch", axis
            1 the sequence, and all others are fixed.
        out: Model repository.
        name: Name of the model.
        version: Version of the model.
        description: One line.
        output_names: Names of the outputs.
        precision: What the arithmetic is done in.
        tolerance: How far from eager PyTorch results may be; left out, that of the precision.
        replace: Whether to replace a different artifact of the same name and version.

    Returns:
        The artifact's folder and its manifest.

    Raises:
        ValueError: Inputs, axes or names do not fit each other.
        ArtifactExistsError: A different artifact is there and `replace` is false.
        ExportError: The graph could not be made.
        ParityError: The graph differs from eager PyTorch by more than its tolerance.
    """
    examples = _by_name(module, example_inputs)
    inputs = tuple(_input(name, example, dynamic_axes) for name, example in examples.items())
    if strangers := sorted(set(dynamic_axes) - set(examples)):
        raise ValueError(f"dynamic_axes names no input: {', '.join(strangers)}")
    signature = Signature(kind=GraphKind.PLAIN, inputs=inputs, outputs=())
    signature = replace_fields(signature, outputs=_outputs(module.eval(), signature, output_names))
    _check_independence(module, signature, tolerance or FP32_TOLERANCE)
    return publish(
        Subject(module=module, signatures=(signature,)),
        Naming(name, version, description or type(module).__name__),
        Path(out),
        precision=precision,
        tolerance=tolerance,
        replace=replace,
    )


def _by_name(module: nn.Module, examples: Mapping[str, Tensor] | Sequence[Tensor]) -> dict[str, Tensor]:
    parameters = inspect.signature(module.forward).parameters
    if isinstance(examples, Tensor):
        raise ValueError("example_inputs: give tensors by name, or a sequence of them")  # noqa: TRY004
    if not isinstance(examples, Mapping):
        if len(examples) > len(parameters):
            raise ValueError(f"{len(examples)} example_inputs; forward takes {', '.join(parameters)}")
        examples = dict(zip(parameters, examples, strict=False))
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    if not examples or set(examples) - set(parameters) or set(required) - set(examples):
        raise ValueError(f"example_inputs={list(examples)}: forward takes {', '.join(parameters)}")
    if taken := sorted(set(examples) & RESERVED):
        raise ValueError(
            f"example_inputs: {', '.join(taken)} has a meaning of its own in requests; rename it"
        )
    return dict(examples)


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
    return tensor(name, DATA_TYPES[example.dtype], *shape, limit=_limit(name, example))


def _limit(name: str, example: Tensor) -> int | None:
    """The first id that is too large: one above the largest of the example."""
    if example.dtype != torch.int64:
        return None
    if example.numel() == 0 or example.min() < 0:
        raise ValueError(f"example_inputs[{name!r}]: ids must be there, and count from 0")
    return int(example.max()) + 1


def _outputs(module: nn.Module, signature: Signature, names: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Names, types and axes of the outputs, from two runs of different sizes."""
    axes = signature.axes
    sizes = [dict(zip(axes, primes, strict=False)) for primes in (FIRST_SIZES, SECOND_SIZES)]
    first, second = (call_eager(module, signature, random_inputs(signature, size, _rng())) for size in sizes)
    if len(first) != len(names):
        raise ValueError(f"output_names={list(names)}: the module gives {len(first)} outputs")
    by_sizes = {(sizes[0][axis], sizes[1][axis]): axis for axis in axes}
    specs = []
    for name, one, other in zip(names, first, second, strict=True):
        pairs = list(zip(one.shape, other.shape, strict=True))
        if unknown := [pair for pair in pairs if pair[0] != pair[1] and pair not in by_sizes]:
            raise ValueError(f"output {name!r}: its axis of sizes {unknown[0]} is no axis of an input")
        shape = [by_sizes.get(pair, pair[0]) for pair in pairs]
        if one.dtype not in DATA_TYPES or shape[:1] != [BATCH_AXIS]:
            raise ValueError(f"output {name!r} is {one.dtype} {shape}; it must begin with the batch axis")
        specs.append(tensor(name, DATA_TYPES[one.dtype], *shape))
    return tuple(specs)


def _check_independence(module: nn.Module, signature: Signature, tolerance: Tolerance) -> None:
    """Refuses modules that mix the sequences of a batch: those come from different callers."""
    sizes = dict(zip(signature.axes, FIRST_SIZES, strict=False))
    inputs = random_inputs(signature, sizes, _rng())
    together = run_eager(module, signature, inputs)
    for index in range(sizes[BATCH_AXIS]):
        own = {name: array[index : index + 1] for name, array in inputs.items()}
        for name, alone in run_eager(module, signature, own).items():
            if not tolerance.holds(alone[0], together[name][index]):
                raise ValueError(f"output {name!r}: a sequence has another result alone than in a batch")


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)
