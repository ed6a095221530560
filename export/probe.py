"""Runs a module in eager PyTorch before its export: finds its outputs, checks what servers rely on."""

import math
import sys
import time
import traceback
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from attention_serving.artifact.golden import Arrays, GoldenCase
from attention_serving.artifact.manifest import BATCH_AXIS, TensorSpec
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.adapted import AdaptedModule
from attention_serving.export.assumptions import LONGEST_SERVED
from attention_serving.export.errors import ExportError
from attention_serving.export.parity import LONGEST
from attention_serving.export.signature import (
    MASK_HEADS_AXIS,
    Signature,
    call_eager,
    output_tensors,
    random_inputs,
    tensor,
)

DATA_TYPES = {torch.float32: "float32", torch.int64: "int64", torch.bool: "bool"}
# Two sets of sizes without a common one: an axis of an output is fixed if its size is the same for both.
FIRST_SIZES, SECOND_SIZES = (2, 3, 5, 7, 11, 12), (13, 17, 19, 23, 29, 31)
# Lengths that a module is tried with, up to the largest that servers accept by default.
TRIED_LENGTHS = (LONGEST, 2049, 4097, LONGEST_SERVED)
# A length is not tried if it is expected to take longer, nor if it needs more than the free memory: three
# copies of the scores of eight heads for each pair of rows.
LONG_RUN_SECONDS, PAIR_BYTES = 20.0, 3 * 8 * 4
MEMORY_FILE = Path("/proc/meminfo")
LongCase: TypeAlias = tuple[Mapping[str, int], GoldenCase]
"""Sizes of the symbolic axes, and what eager PyTorch computes."""
FAST_PATH_NOTE = (
    "eager PyTorch means the operators of its layers. The fused kernels that torch.nn.TransformerEncoder "
    "uses in evaluation mode return other values for this module, such as zeros for rows that a mask inside "
    "it hides"
)
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
    first, second = (_run(module, signature, sizes) for sizes in (small, large))
    if len(first) != len(names):
        shapes = ", ".join(str(list(output.shape)) for output in first)
        raise ValueError(
            f"output_names={list(names)}: the module returns {len(first)} outputs, of shapes {shapes}; name "
            f"each of them, or wrap the module to return fewer"
        )
    return tuple(
        _output(name, first_output, second_output, by_sizes)
        for name, first_output, second_output in zip(names, first, second, strict=True)
    )


def _output(name: str, small: Tensor, large: Tensor, by_sizes: Mapping[tuple[int, int], str]) -> TensorSpec:
    pairs = list(zip(small.shape, large.shape, strict=True))
    if unknown := [pair for pair in pairs if pair[0] != pair[1] and pair not in by_sizes]:
        raise ValueError(
            f"output {name!r}: its axis of sizes {unknown[0]} is not an axis of an input; every axis must "
            f"be an axis of an input, or have a fixed size"
        )
    shape = [by_sizes.get(pair, pair[0]) for pair in pairs]
    if small.dtype not in DATA_TYPES or shape[:1] != [BATCH_AXIS]:
        raise ValueError(f"output {name!r} is {small.dtype} {shape}; it must begin with the batch axis")
    return tensor(name, DATA_TYPES[small.dtype], *shape)


def find_least_lengths(module: nn.Module, signature: Signature, example: Mapping[str, int]) -> Signature:
    """The signature with the smallest length on each axis, from 1, that the module takes.

    Args:
        module: The module.
        signature: The signature of its plain graph.
        example: Lengths that the caller ran it with.

    Raises:
        ExportError: The module does not run.
        NotANumberError: Its result is not a number.
    """
    choices = [first_sizes(signature), _second_sizes(signature), {BATCH_AXIS: 2, **example}]
    sizes = next((sizes for sizes in choices if _takes(module, signature, sizes)), None)
    if sizes is None:
        try:
            _run(module, signature, sizes := choices[0])
        except ExportError as error:
            raise error.with_advice(
                f". Inputs are (batch, sequence, ...): if the module takes (sequence, batch, ...), "
                f"{BATCH_FIRST}"
            ) from error
    least = dict[str, int]()
    for axis in signature.sequence_axes:
        takes = partial(_takes_length, module, signature, sizes, axis)
        if not takes(1):
            least[axis] = 1 + bisect_left(range(1, sizes[axis]), True, key=takes)  # noqa: FBT003
    return replace(signature, min_lengths=least)


def find_largest_lengths(
    module: nn.Module, signature: Signature, bounds: Mapping[str, int]
) -> tuple[Signature, list[LongCase]]:
    """The signature with the largest length on each axis, and what the module computes for such sequences.

    It is the largest length that a server accepts by default, or the largest that the module takes, or that
    it was tried with if time or memory forbid to try more. One that the caller stated is kept.

    Args:
        module: The module.
        signature: The signature of its plain graph.
        bounds: By axis, the largest lengths that the caller stated.

    Raises:
        ExportError: The module fails at a length that the caller stated, and does not at smaller ones.
    """
    largest, cases = dict(signature.max_lengths), list[LongCase]()
    for axis in signature.sequence_axes:
        most = min(largest.get(axis, LONGEST_SERVED), LONGEST_SERVED)
        reach = _Reach(module, signature, axis)
        reach.extend(most)
        if reach.error is not None and axis in bounds:
            advice = f"; max_length={most} of axis {axis!r} is more than the module takes"
            raise reach.error.with_advice(advice) from reach.error
        if axis not in bounds:
            largest[axis] = reach.length
        cases += reach.cases
    return replace(signature, max_lengths=largest), cases


class _Reach:
    """How many rows one sequence of a module may have on an axis.

    Attributes:
        length: The largest that it was run with.
        error: Why it is not larger; None if the module did not fail.
        cases: Its results for more rows than the parity grid has.
    """

    def __init__(self, module: nn.Module, signature: Signature, axis: str) -> None:
        self._module, self._signature, self._axis = module, signature, axis
        self._sizes = {**first_sizes(signature), BATCH_AXIS: 1}
        self.length = self._sizes[axis]
        self.error: ExportError | None = None
        self.cases: list[LongCase] = []

    def extend(self, most: int) -> None:
        """Tries longer sequences, up to a length, as far as time and memory allow."""
        free, seconds = _free_bytes(), 0.0
        for length in (*(tried for tried in TRIED_LENGTHS if self.length < tried < most), most):
            expected = seconds * (length / self.length) ** 2
            if PAIR_BYTES * length**2 > free or expected > LONG_RUN_SECONDS:
                return
            started = time.monotonic()
            try:
                self._run(length)
            except NotANumberError:
                raise
            except ExportError as error:
                self.error = error
                longer = range(self.length + 1, length)
                self._run(self.length + bisect_left(longer, True, key=lambda rows: not self._takes(rows)))  # noqa: FBT003
                return
            seconds = time.monotonic() - started

    def _run(self, length: int) -> None:
        sizes, case = self._case(length)
        self.length = length
        if length > LONGEST:
            self.cases.append((sizes, case))

    def _takes(self, length: int) -> bool:
        try:
            self._case(length)
        except NotANumberError:
            raise
        except ExportError:
            return False
        return True

    def _case(self, length: int) -> LongCase:
        sizes = {**self._sizes, self._axis: length}
        inputs = random_inputs(self._signature, sizes, rng())
        case = GoldenCase(self._signature.kind, inputs, outputs(self._module, self._signature, inputs))
        # Random ids can include padding, which some models do not count as rows; the largest id is not.
        largest = {
            spec.name: np.full_like(inputs[spec.name], spec.exclusive_upper_bound - 1)
            for spec in self._signature.inputs
            if spec.exclusive_upper_bound
        }
        if largest:
            outputs(self._module, self._signature, inputs | largest)
        return sizes, case


def _free_bytes() -> int:
    """Memory that is free, or that the system can free; unlimited where the system does not say it."""
    if not MEMORY_FILE.exists():
        return sys.maxsize
    words = MEMORY_FILE.read_text(encoding="utf-8").split()
    return int(words[words.index("MemAvailable:") + 1]) * 1024


def output_scale(module: nn.Module, signature: Signature, cases: Iterable[LongCase]) -> float:
    """How much larger than usual the outputs are, and with them rounding: a power of two, from 1.

    For standard normal inputs, the usual outputs are those of short sequences: a sum grows with the length.
    """
    results = outputs(module, signature, random_inputs(signature, first_sizes(signature), rng()))
    short = _magnitude(results)
    usual = 1.0 if signature.ranges else max(1.0, short)
    largest = max(short, *(_magnitude(case.outputs) for _, case in cases), usual)
    return 2.0 ** math.ceil(math.log2(largest / usual))


def _magnitude(results: Arrays) -> float:
    """The largest root of the mean square of an output."""
    squares = [np.square(array, dtype=np.float64) for array in results.values()]
    return math.sqrt(max(float(values.mean()) for values in squares))


def check_repeatable(module: nn.Module, signature: Signature) -> None:
    """Refuses modules that draw random numbers.

    Raises:
        ExportError: Two runs on the same inputs differ.
    """
    inputs = random_inputs(signature, first_sizes(signature), rng())
    first, second = (outputs(module, signature, inputs) for _ in range(2))
    for name in first:
        if not np.array_equal(first[name], second[name], equal_nan=True):
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
        sequence = {name: array[index : index + 1] for name, array in inputs.items()}
        for name, alone in outputs(module, signature, sequence).items():
            if not tolerance.holds(alone[0], together[name][index]):
                raise ExportError(
                    f"output {name!r}: the result of a sequence depends on its batch; the sequences of a "
                    f"batch come from different callers and must not depend on each other. If the module "
                    f"takes (sequence, batch, ...), {BATCH_FIRST}"
                )


def first_sizes(signature: Signature) -> dict[str, int]:
    """The first probe, one row below the largest length at most, so that the second can differ."""
    sizes = _above_least(signature, FIRST_SIZES)
    if MASK_HEADS_AXIS in sizes:  # modules take one mask for all heads
        sizes[MASK_HEADS_AXIS] = 1
    return {axis: min(size, signature.max_lengths.get(axis, size + 1) - 1) for axis, size in sizes.items()}


def _second_sizes(signature: Signature) -> dict[str, int]:
    sizes = _above_least(signature, SECOND_SIZES)
    return {axis: signature.clip(axis, size) for axis, size in sizes.items()}


def _above_least(signature: Signature, sizes: Sequence[int]) -> dict[str, int]:
    """Sizes of the axes, each as far above the smallest one as it would be above 1."""
    pairs = zip(signature.axes, sizes, strict=False)
    return {axis: size + signature.min_lengths.get(axis, 1) - 1 for axis, size in pairs}


def outputs(module: nn.Module, signature: Signature, inputs: Arrays, *, accepts_nan: bool = False) -> Arrays:
    """The outputs of a module by name.

    Raises:
        ExportError: The module fails.
        NotANumberError: An output is not a number, and that is not accepted.
    """
    results = _try(module, signature, inputs, accepts_nan=accepts_nan)
    return {spec.name: output.numpy() for spec, output in zip(signature.outputs, results, strict=True)}


def _run(module: nn.Module, signature: Signature, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
    return _try(module, signature, random_inputs(signature, sizes, rng()))


def _takes(module: nn.Module, signature: Signature, sizes: Mapping[str, int]) -> bool:
    """Whether the module runs with these sizes."""
    try:
        _run(module, signature, sizes)
    except NotANumberError:
        raise
    except ExportError:
        return False
    return True


def _takes_length(
    module: nn.Module, signature: Signature, sizes: Mapping[str, int], axis: str, length: int
) -> bool:
    return _takes(module, signature, {**sizes, axis: length})


class NotANumberError(ExportError):
    """The result of a module for finite values is not a number, so that it cannot be compared."""


def _try(
    module: nn.Module, signature: Signature, inputs: Arrays, *, accepts_nan: bool = False
) -> tuple[Tensor, ...]:
    try:
        results = call_eager(module, signature, inputs)
    except Exception as error:  # a module may raise anything
        raise failure(inputs, error) from error
    for index, result in enumerate(results):
        if not accepts_nan and bool(result.isnan().any()):
            name = signature.outputs[index].name if signature.outputs else str(index)
            raise NotANumberError(
                f"output {name!r}: eager PyTorch returns NaN for finite inputs, which proves nothing. Give "
                f"example_inputs (and examples=[...]) with values as requests have them: they are tested in "
                f"the range of the examples"
            )
    return results


def failure(inputs: Arrays | Mapping[str, Tensor], error: Exception) -> ExportError:
    """What a module raised for inputs."""
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
    first = str(error).strip().partition("\n")[0]
    message = f"the module fails for {shapes}: {type(error).__name__}: {first}"
    return ExportError(message, "".join(traceback.format_exception(error)))


def fast_path_notes(module: AdaptedModule, signature: Signature, tolerance: Tolerance) -> list[str]:
    """A note if PyTorch's fused transformer layers return something else than the operators they replace.

    They do so for rows that a mask inside the module hides, which may be rows of zeros, or of the id 0.
    """
    inputs = random_inputs(signature, first_sizes(signature), rng())
    for spec in signature.inputs:
        array = inputs[spec.name]
        if spec.row_axis is not None:
            array[:, 1 + array.shape[1] // 2 :] = 0
    tensors = {spec.name: torch.from_numpy(inputs[spec.name]) for spec in signature.inputs}
    try:
        standard = outputs(module, signature, inputs).values()
        with torch.inference_mode():
            fused = output_tensors(module.call(module.arguments(tensors)))
    except Exception:  # the module may raise anything for such rows
        return []
    equal = [tolerance.holds(values.numpy(), array) for values, array in zip(fused, standard, strict=True)]
    return [] if all(equal) else [FAST_PATH_NOTE]


def rng() -> np.random.Generator:
    """The random numbers of every probe."""
    return np.random.default_rng(0)
