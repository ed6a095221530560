"""Runs a module in eager PyTorch before its export: finds its outputs, checks what servers rely on."""

import traceback
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from attention_serving.artifact.golden import Arrays
from attention_serving.artifact.manifest import BATCH_AXIS, TensorSpec
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.errors import ExportError
from attention_serving.export.parity import LONGEST
from attention_serving.export.signature import MASK_HEADS_AXIS, Signature, call_eager, random_inputs, tensor

DATA_TYPES = {torch.float32: "float32", torch.int64: "int64", torch.bool: "bool"}
# Two sets of sizes without a common one: an axis of an output is fixed if its size is the same for both.
FIRST_SIZES, SECOND_SIZES = (2, 3, 5, 7, 11), (13, 17, 19, 23, 29)
# A stated largest length is tried up to here, beyond which a run takes long.
LONGEST_TRIED = 2048
BATCH_FIRST = (
    "build its layers with batch_first=True, or transpose the first two axes of inputs and outputs in forward"
)
BATCH_SECOND = f"the module takes (sequence, batch, ...), and must take (batch, sequence, ...): {BATCH_FIRST}"


def find_outputs(module: nn.Module, signature: Signature, names: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Names, types and axes of the outputs, from two runs of different sizes.

    Raises:
        ValueError: The module does not run, or its outputs cannot be served under these names.
    """
    small, large = first_sizes(signature), _second_sizes(signature)
    by_sizes = {(small[axis], large[axis]): axis for axis in signature.axes}
    if len(by_sizes) < len(signature.axes):
        raise ValueError(f"max_length={dict(signature.max_lengths)}: too small to tell the axes apart")
    try:
        first, second = (_run(module, signature, sizes) for sizes in (small, large))
    except ExportError as error:
        raise error.with_advice(
            f". Inputs are (batch, sequence, ...): if the module takes (sequence, batch, ...), {BATCH_FIRST}"
        ) from error
    if len(first) != len(names):
        shapes = ", ".join(str(list(output.shape)) for output in first)
        raise ValueError(
            f"output_names={list(names)}: the module returns {len(first)} outputs, of shapes {shapes}; name "
            f"each of them, or wrap the module to return fewer"
        )
    return tuple(
        _output(name, one, other, by_sizes) for name, one, other in zip(names, first, second, strict=True)
    )


def _output(name: str, one: Tensor, other: Tensor, by_sizes: Mapping[tuple[int, int], str]) -> TensorSpec:
    pairs = list(zip(one.shape, other.shape, strict=True))
    if unknown := [pair for pair in pairs if pair[0] != pair[1] and pair not in by_sizes]:
        raise ValueError(
            f"output {name!r}: its axis of sizes {unknown[0]} is not an axis of an input; every axis must "
            f"be an axis of an input, or have a fixed size"
        )
    shape = [by_sizes.get(pair, pair[0]) for pair in pairs]
    if one.dtype not in DATA_TYPES or shape[:1] != [BATCH_AXIS]:
        raise ValueError(f"output {name!r} is {one.dtype} {shape}; it must begin with the batch axis")
    return tensor(name, DATA_TYPES[one.dtype], *shape)


def check_lengths(module: nn.Module, signature: Signature) -> None:
    """Runs one sequence of the largest length, or of the longest one that parity is measured at.

    Raises:
        ValueError: The module fails at that length, and does not at small ones.
    """
    lengths = {
        axis: min(signature.max_lengths.get(axis, LONGEST), LONGEST_TRIED) for axis in signature.sequence_axes
    }
    try:
        _run(module, signature, lengths | {BATCH_AXIS: 1})
    except ExportError as error:
        raise error.with_advice(
            ". If a table of positions limits the length of sequences, pass the number of its rows as "
            "max_length"
        ) from error


def check_repeatable(module: nn.Module, signature: Signature) -> None:
    """Refuses modules that draw random numbers.

    Raises:
        ExportError: Two runs on the same inputs differ.
    """
    inputs = random_inputs(signature, first_sizes(signature), rng())
    one, other = (outputs(module, signature, inputs) for _ in range(2))
    for name in one:
        if not np.array_equal(one[name], other[name], equal_nan=True):
            raise ExportError(
                f"output {name!r}: two runs on the same inputs differ; the module draws random numbers in "
                f"evaluation mode. Use nn.Dropout, or F.dropout(..., training=self.training)"
            )


def check_independence(module: nn.Module, signature: Signature, tolerance: Tolerance) -> None:
    """Refuses modules that mix the sequences of a batch, which come from different callers.

    Raises:
        ExportError: The result of a sequence depends on the other sequences of its batch.
    """
    sizes = first_sizes(signature)
    inputs = random_inputs(signature, sizes, rng())
    together = outputs(module, signature, inputs)
    for index in range(sizes[BATCH_AXIS]):
        own = {name: array[index : index + 1] for name, array in inputs.items()}
        for name, alone in outputs(module, signature, own).items():
            if not tolerance.holds(alone[0], together[name][index]):
                raise ExportError(
                    f"output {name!r}: the result of a sequence depends on its batch; the sequences of a "
                    f"batch come from different callers and must not depend on each other. If the module "
                    f"takes (sequence, batch, ...), {BATCH_FIRST}"
                )


def first_sizes(signature: Signature) -> dict[str, int]:
    """The first probe, one row below the largest length at most, so that the second can differ."""
    sizes = dict(zip(signature.axes, FIRST_SIZES, strict=False))
    if MASK_HEADS_AXIS in sizes:  # modules take one mask for all heads
        sizes[MASK_HEADS_AXIS] = 1
    return {axis: min(size, signature.max_lengths.get(axis, size + 1) - 1) for axis, size in sizes.items()}


def _second_sizes(signature: Signature) -> dict[str, int]:
    sizes = dict(zip(signature.axes, SECOND_SIZES, strict=False))
    return {axis: signature.clip(axis, size) for axis, size in sizes.items()}


def outputs(module: nn.Module, signature: Signature, inputs: Arrays) -> Arrays:
    """The outputs of a module by name.

    Raises:
        ExportError: The module fails.
    """
    found = _try(module, signature, inputs)
    return {spec.name: output.numpy() for spec, output in zip(signature.outputs, found, strict=True)}


def _run(module: nn.Module, signature: Signature, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
    return _try(module, signature, random_inputs(signature, sizes, rng()))


def _try(module: nn.Module, signature: Signature, inputs: Arrays) -> tuple[Tensor, ...]:
    try:
        return call_eager(module, signature, inputs)
    except Exception as error:  # a module may raise anything
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
        first, *others = str(error).strip().splitlines() or [""]
        message = f"the module fails for {shapes}: {type(error).__name__}: {first}"
        if others:
            raise ExportError.with_details(message, traceback.format_exc()) from error
        raise ExportError(message) from error


def rng() -> np.random.Generator:
    """The random numbers of every probe."""
    return np.random.default_rng(0)
