"""Runs a module in eager PyTorch before its export, to find its outputs and check what servers rely on."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from artifact.golden import Arrays
from artifact.manifest import BATCH_AXIS, KEY_LENGTHS, TensorSpec
from artifact.tolerance import Tolerance
from export.parity import LONGEST
from export.signature import Signature, call_eager, random_inputs, tensor

DATA_TYPES = {torch.float32: "float32", torch.int64: "int64", torch.bool: "bool"}
# Two sets of sizes without a common one: an axis of an output is fixed if its size is the same for both.
FIRST_SIZES, SECOND_SIZES = (2, 3, 5, 7, 11), (13, 17, 19, 23, 29)
# A stated largest length is tried up to here, beyond which a run takes long.
LONGEST_TRIED = 2048


def find_outputs(module: nn.Module, signature: Signature, names: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Names, types and axes of the outputs, from two runs of different sizes.

    Raises:
        ValueError: The module does not run, or its outputs cannot be served under these names.
    """
    first_sizes, second_sizes = _first_sizes(signature), _second_sizes(signature)
    by_sizes = {(first_sizes[axis], second_sizes[axis]): axis for axis in signature.axes}
    if len(by_sizes) < len(signature.axes):
        raise ValueError(f"max_length={dict(signature.max_lengths)}: too small to tell the axes apart")
    first, second = (_run(module, signature, sizes) for sizes in (first_sizes, second_sizes))
    if len(first) != len(names):
        raise ValueError(f"output_names={list(names)}: the module returns {len(first)} outputs")
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
    except ValueError as error:
        raise ValueError(
            f"{error}. If a table of positions limits the length of sequences, pass the number of its "
            f"rows as max_length"
        ) from error


def check_independence(module: nn.Module, signature: Signature, tolerance: Tolerance) -> None:
    """Refuses modules that mix the sequences of a batch, which come from different callers.

    Raises:
        ValueError: The result of a sequence depends on the other sequences of its batch.
    """
    sizes = _first_sizes(signature)
    inputs = random_inputs(signature, sizes, _rng())
    together = _outputs(module, signature, inputs)
    for index in range(sizes[BATCH_AXIS]):
        own = {name: array[index : index + 1] for name, array in inputs.items()}
        for name, alone in _outputs(module, signature, own).items():
            if not tolerance.holds(alone[0], together[name][index]):
                raise ValueError(
                    f"output {name!r}: the result of a sequence depends on its batch; the sequences "
                    f"of a batch come from different callers and must not depend on each other"
                )


def check_padding(module: nn.Module, signature: Signature, tolerance: Tolerance) -> None:
    """Refuses modules whose results depend on rows after the key length.

    Raises:
        ValueError: The result of a sequence depends on its padding.
    """
    sizes = _first_sizes(signature)
    inputs = random_inputs(signature, sizes, _rng())
    axis = signature.key_axis
    inputs[KEY_LENGTHS] = np.array([sizes[axis] - 1, *[sizes[axis]] * (sizes[BATCH_AXIS] - 1)])
    together = _outputs(module, signature, inputs)
    for index, length in enumerate(inputs[KEY_LENGTHS].tolist()):
        own = {name: array[index : index + 1] for name, array in inputs.items()}
        own |= {s.name: own[s.name][:, :length] for s in signature.inputs if axis in s.axes}
        alone = _outputs(module, signature, own)
        for spec in signature.outputs:
            rows = together[spec.name][index]
            rows = rows[:length] if axis in spec.axes else rows
            if not tolerance.holds(alone[spec.name][0], rows):
                raise ValueError(
                    f"output {spec.name!r}: the result of a sequence depends on rows that attention_mask "
                    f"hides (1 = attend, 0 = hidden); export the module without attention_mask"
                )


def _first_sizes(signature: Signature) -> dict[str, int]:
    """The first probe, one row below the largest length at most, so that the second can differ."""
    sizes = dict(zip(signature.axes, FIRST_SIZES, strict=False))
    return {axis: min(size, signature.max_lengths.get(axis, size + 1) - 1) for axis, size in sizes.items()}


def _second_sizes(signature: Signature) -> dict[str, int]:
    sizes = dict(zip(signature.axes, SECOND_SIZES, strict=False))
    return {axis: signature.clip(axis, size) for axis, size in sizes.items()}


def _outputs(module: nn.Module, signature: Signature, inputs: Arrays) -> Arrays:
    outputs = call_eager(module, signature, inputs)
    return {spec.name: output.numpy() for spec, output in zip(signature.outputs, outputs, strict=True)}


def _run(module: nn.Module, signature: Signature, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
    inputs = random_inputs(signature, sizes, _rng())
    try:
        return call_eager(module, signature, inputs)
    except Exception as error:  # a module may raise anything
        found = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(f"the module fails for {found}: {type(error).__name__}: {error}") from error


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)
