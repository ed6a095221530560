"""Runs a module in eager PyTorch before its export: finds its outputs, checks what servers rely on."""

import math
import sys
import time
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS
from attention_serving.artifact.golden import Arrays, GoldenCase
from attention_serving.artifact.manifest import BATCH_AXIS, DerivedAxis, TensorSpec, has_weights_axes
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.adapted import AdaptedModule
from attention_serving.export.assumptions import LONGEST_SERVED, user_line
from attention_serving.export.derived import derive_axis
from attention_serving.export.errors import ExportError, first_line
from attention_serving.export.parity import LONGEST
from attention_serving.export.precision import Precision
from attention_serving.export.signature import (
    MASK_HEADS_AXIS,
    PositionalModule,
    Signature,
    arrays_by_name,
    call_eager,
    output_tensors,
    random_inputs,
    shapes_of,
    tensor,
    without_fused_layers,
)
from attention_serving.export.state import Writes

ROUNDED = {torch.bfloat16: Precision.BF16, torch.float16: Precision.FP16}
DATA_TYPES = {torch.float32: "float32", torch.int64: "int64", torch.bool: "bool"}
# Sets of sizes without a common one: an axis of an output is fixed if its size is the same for all.
FIRST_SIZES, SECOND_SIZES = (2, 3, 5, 7, 11, 12), (13, 17, 19, 23, 29, 31)
# Further ones, if the module takes them.
FURTHER_SIZES = (1,) * 6, (1, LONGEST, LONGEST + 8, LONGEST + 10, LONGEST + 28)
# Lengths that a module is tried with, up to the largest that servers accept by default.
TRIED_LENGTHS = (LONGEST, 2049, 4097, LONGEST_SERVED)
# A length is not tried if it is expected to take longer, nor if it needs more than the free memory: three
# copies of the scores of eight heads for each pair of rows.
# Outputs have copies, in float64 too.
LONG_RUN_SECONDS, PAIR_BYTES, OUTPUT_COPIES = 20.0, 3 * 8 * 4, 8
# The sum of attention weights that were rounded to bfloat16 differs from 1 by less.
SUM_TOLERANCE = 2.0**-8
MEMORY_FILE = Path("/proc/meminfo")
Result = TypeVar("Result")
LongCase: TypeAlias = tuple[Mapping[str, int], GoldenCase]
"""Sizes of the symbolic axes, and what eager PyTorch computes."""
FAST_PATH_NOTE = (
    "eager PyTorch means the operators of its layers. The fused kernels that torch.nn.TransformerEncoder "
    "uses in evaluation mode return other values for this module, such as zeros for rows that a mask inside "
    "it hides"
)


def find_outputs(module: nn.Module, signature: Signature, names: Sequence[str]) -> Signature:
    """The signature with names, types and axes of the outputs, from runs of different sizes.

    Raises:
        ValueError: The module does not run, or its outputs cannot be served under these names.
    """
    further = [_clipped(signature, sizes) for sizes in FURTHER_SIZES]
    tries = [first_sizes(signature), _clipped(signature, SECOND_SIZES)]
    tries += [sizes for sizes in further if _takes(module, signature, sizes)]
    by_sizes = {tuple(sizes[axis] for sizes in tries): axis for axis in signature.axes}
    if len(by_sizes) < len(signature.axes):
        raise ValueError(f"max_length={dict(signature.max_lengths)}: too small to tell the axes apart")
    results = [_run(module, signature, sizes) for sizes in tries]
    first = results[0]
    if len(first) != len(names):
        shapes = ", ".join(str(list(output.shape)) for output in first)
        raise ValueError(
            f"output_names={list(names)}: the module returns {len(first)} outputs, of shapes {shapes}; name "
            f"each of them, or wrap the module to return fewer"
        )
    run = cache(partial(_shapes, module, signature, tries[0]))
    derived, specs = dict[str, DerivedAxis](), list[TensorSpec]()
    for index, (name, *values) in enumerate(zip(names, *results, strict=True)):
        axes = list[str | int]()
        for at, sizes in enumerate(zip(*(value.shape for value in values), strict=True)):
            if sizes in by_sizes or len(set(sizes)) == 1:
                axes.append(by_sizes.get(sizes, sizes[0]))
                continue
            formula = _derive(signature, tries, partial(_size_at, run, index, at))
            if formula is None:
                raise ValueError(
                    f"output {name!r}: its axis {at} has the sizes {', '.join(map(str, sizes))} where "
                    f"those of the inputs are {', '.join(map(str, tries))}. It is not an axis of an input, "
                    f"and its size does not follow from one sequence axis alone, as T + 1 or T // 2 do: "
                    f"return the parts as outputs of their own, or a fixed size"
                )
            names_of_axes = (axis for axis, other in derived.items() if other == formula)
            axes.append(next(names_of_axes, f"{formula.axis}_{len(derived) + 1}"))
            derived[str(axes[-1])] = formula
        dtype = values[0].dtype
        if dtype not in DATA_TYPES or axes[:1] != [BATCH_AXIS]:
            raise ValueError(f"output {name!r} is {dtype} {axes}; it must begin with the batch axis")
        specs.append(tensor(name, DATA_TYPES[dtype], *axes))
    weights = [
        spec.name
        for spec, *values in zip(specs, *results, strict=True)
        if has_weights_axes(spec) and all(map(_has_rows_of_sum_1, values))
    ]
    chosen = ATTENTION_WEIGHTS if ATTENTION_WEIGHTS in weights else next(reversed(weights), "")
    return replace(signature, outputs=tuple(specs), derived_axes=derived, attention_weights=chosen)


def _has_rows_of_sum_1(values: Tensor) -> bool:
    sums = values.sum(-1)
    return bool((values >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=SUM_TOLERANCE)


SizeAt: TypeAlias = Callable[[str, int], int | None]
"""The size of an axis of an output for a length on a sequence axis; None if the module does not take it."""


def _derive(signature: Signature, tries: Sequence[Mapping[str, int]], size_at: SizeAt) -> DerivedAxis | None:
    """How the size of an axis of an output follows from the one sequence axis that it depends on."""
    usual, longest = tries[0], tries[-1]
    axes = [
        axis for axis in signature.sequence_axes if size_at(axis, longest[axis]) != size_at(axis, usual[axis])
    ]
    if len(axes) != 1:
        return None
    (axis,) = axes
    most, step = signature.max_lengths.get(axis, LONGEST_SERVED), signature.length_multiples.get(axis, 1)
    lengths = range(signature.min_lengths.get(axis, 1), most + 1, step)
    return derive_axis(axis, partial(size_at, axis), lengths)


def _size_at(
    run: Callable[[str, int], Sequence[Sequence[int]]], index: int, at: int, axis: str, length: int
) -> int | None:
    shapes = run(axis, length)
    return shapes[index][at] if shapes else None


def _shapes(
    module: nn.Module, signature: Signature, sizes: Mapping[str, int], axis: str, length: int
) -> list[torch.Size]:
    """The shapes of the outputs for a length; none if the module does not take it."""
    results = _attempt(partial(_run, module, signature, {**sizes, axis: length}))
    return [output.shape for output in results or ()]


def find_least_lengths(module: nn.Module, signature: Signature, example: Mapping[str, int]) -> Signature:
    """The signature with the smallest length on each axis, from 1, and what all lengths are a multiple of.

    Args:
        module: The module.
        signature: The signature of its plain graph.
        example: Lengths that the caller ran it with.

    Raises:
        ExportError: The module does not run.
        NotANumberError: Its result is not a number.
    """
    choices = [first_sizes(signature), _clipped(signature, SECOND_SIZES), {BATCH_AXIS: 2, **example}]
    sizes = next((sizes for sizes in choices if _takes(module, signature, sizes)), None)
    if sizes is None:
        _run(module, signature, sizes := choices[0])  # which raises
    least, multiples = dict[str, int](), dict[str, int]()
    for axis in signature.sequence_axes:
        takes, size = partial(_takes_length, module, signature, sizes, axis), sizes[axis]
        if takes(1):
            continue
        if not takes(size + 1) and not takes(size - 1):
            divisors = (n for n in range(2, size + 1) if size % n == 0)
            # One sequence: the rows of several may fill a multiple together.
            alone = partial(_takes_length, module, signature, {**sizes, BATCH_AXIS: 1}, axis)
            step = next((n for n in divisors if all(alone(times * n) for times in (1, 2, 3))), None)
            if step is not None:
                least[axis] = multiples[axis] = step
                continue
        least[axis] = 1 + bisect_left(range(1, size), True, key=takes)  # noqa: FBT003
    return replace(signature, min_lengths=least, length_multiples=multiples)


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
        free, seconds, output_bytes = _free_bytes(), 0.0, 0
        tries = (self._signature.clip(self._axis, tried) for tried in TRIED_LENGTHS)
        step = self._signature.length_multiples.get(self._axis, 1)
        most = most // step * step
        for length in (*(tried for tried in tries if self.length < tried < most), most):
            growth = (length / self.length) ** 2
            size = PAIR_BYTES * length**2 + OUTPUT_COPIES * output_bytes * growth
            if size > free or seconds * growth > LONG_RUN_SECONDS:
                return
            started = time.monotonic()
            try:
                output_bytes = self._run(length)
            except NotANumberError:
                raise
            except ExportError as error:
                self.error = error
                longer = range(self.length + step, length, step)
                count = bisect_left(longer, True, key=self._fails)  # noqa: FBT003
                self._run(self.length + step * count)
                return
            seconds = time.monotonic() - started

    def _run(self, length: int) -> int:
        """Runs one sequence, and returns the bytes of its outputs."""
        sizes, case = self._case(length)
        self.length = length
        if length > LONGEST:
            self.cases.append((sizes, case))
        return sum(array.nbytes for array in case.outputs.values())

    def _fails(self, length: int) -> bool:
        """Whether the module does not take so many rows."""
        return _attempt(partial(self._case, length)) is None

    def _case(self, length: int) -> LongCase:
        sizes = {**self._sizes, self._axis: length}
        inputs = random_inputs(self._signature, sizes, rng())
        case = GoldenCase(self._signature.kind, inputs, outputs(self._module, self._signature, inputs))
        # Random ids can include padding, which some models do not count as rows; the largest id is not.
        largest = {
            spec.name: np.full_like(inputs[spec.name], np.subtract(spec.exclusive_upper_bound, 1))
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
    short = output_magnitude(module, signature)
    usual = 1.0 if signature.ranges else max(1.0, short)
    largest = max(short, *(_magnitude(case.outputs) for _, case in cases), usual)
    return 2.0 ** math.ceil(math.log2(largest / usual))


def output_precision(module: nn.Module, signature: Signature) -> Precision | None:
    """The precision that a module rounds an output to, if it is less than float32."""
    inputs = random_inputs(signature, first_sizes(signature), rng())
    tensors = {spec.name: torch.from_numpy(inputs[spec.name]) for spec in signature.inputs}
    with torch.inference_mode(), without_fused_layers():
        leaves = tree_leaves(module(**tensors))
    types = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)}
    return next((precision for dtype, precision in ROUNDED.items() if dtype in types), None)


def output_magnitude(module: nn.Module, signature: Signature) -> float:
    """The magnitude of the outputs for short sequences."""
    return _magnitude(outputs(module, signature, random_inputs(signature, first_sizes(signature), rng())))


def _magnitude(results: Arrays) -> float:
    """The largest root of the mean square of an output."""
    squares = [np.square(array, dtype=np.float64) for array in results.values()]
    return math.sqrt(max(float(values.mean()) for values in squares))


def check_repeatable(module: AdaptedModule, signature: Signature, example: Mapping[str, int]) -> None:
    """Refuses modules that change their inputs, keep memory between calls, or draw random numbers.

    Args:
        module: The module, in the state that it had before any call.
        signature: The signature of its plain graph.
        example: Lengths that the caller ran it with.

    Raises:
        ExportError: A run changes its inputs, or depends on the runs before it.
    """
    sizes = {**first_sizes(signature), **example}
    inputs = random_inputs(signature, sizes, rng())
    try:
        first = _try(module, signature, inputs, accepts_nan=True)
    except ExportError:  # the next probe says why
        return
    for name, unchanged in random_inputs(signature, sizes, rng()).items():
        if not np.array_equal(inputs[name], unchanged, equal_nan=True):
            place = _writes(module, signature, sizes, name)
            raise ExportError(
                f"the module changes its input {name!r} in place{place}. Requests of others may share its "
                f"memory: compute on a copy, as {name} = {name}.clone()"
            )
    kept = module.start.changes()
    repeats = _repeats(module, signature, inputs, first)  # before other sizes, which may reset what is kept
    larger = {axis: size + 1 for axis, size in sizes.items()}
    # After the inputs, then before them.
    for call_sizes in (larger, {**sizes, BATCH_AXIS: larger[BATCH_AXIS]}):
        _takes(module, signature, call_sizes)
        kept |= module.start.changes()
        repeats = repeats and _repeats(module, signature, inputs, first)
        module.start.restore()
    if repeats:
        return
    if _repeats(module, signature, inputs, first):
        name = next(iter(kept), "state")
        module.start.restore()
        place = _writes(module, signature, sizes, name.rpartition(".")[2])
        raise ExportError(
            f"the result depends on the calls before: the module keeps self.{name} between calls{place}. "
            f"Requests are independent of each other: take it as an input and return it, or do not change "
            f"it in evaluation mode"
        )
    raise ExportError(
        "two runs on the same inputs differ; the module draws random numbers in evaluation mode. Use "
        "nn.Dropout, or F.dropout(..., training=self.training)"
    )


def _repeats(module: nn.Module, signature: Signature, inputs: Arrays, results: Sequence[Tensor]) -> bool:
    """Whether a run returns the same results again."""
    try:
        again = _try(module, signature, inputs, accepts_nan=True)
    except ExportError:
        return False
    pairs = zip(again, results, strict=True)
    return all(np.array_equal(first.numpy(), second.numpy(), equal_nan=True) for first, second in pairs)


def _writes(module: AdaptedModule, signature: Signature, sizes: Mapping[str, int], name: str) -> str:
    """Where a run writes an input, a buffer or an attribute: the end of a sentence."""
    inputs = random_inputs(signature, sizes, rng())
    tensors = {key: torch.from_numpy(array) for key, array in inputs.items()}
    buffers = {path.rpartition(".")[2]: buffer for path, buffer in module.named_buffers()}
    writes = Writes({**buffers, **tensors})
    with writes.recording(), torch.inference_mode(), without_fused_layers():
        PositionalModule(module, signature)(*(tensors[spec.name] for spec in signature.module_inputs))
    return f", at {writes.places[name]}" if name in writes.places else ""


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
                    f"batch come from different callers and must not depend on each other. If the batch is "
                    f"the second axis, name the axes so: {{0: 'sequence', 1: 'batch'}}"
                )


def first_sizes(signature: Signature) -> dict[str, int]:
    """The first probe, one row below the largest length at most, so that the second can differ."""
    sizes = _above_least(signature, FIRST_SIZES)
    if MASK_HEADS_AXIS in sizes:  # modules take one mask for all heads
        sizes[MASK_HEADS_AXIS] = 1
    steps = signature.length_multiples
    return {
        axis: min(size, signature.max_lengths.get(axis, size + steps.get(axis, 1)) - steps.get(axis, 1))
        for axis, size in sizes.items()
    }


def _clipped(signature: Signature, sizes_above: Sequence[int]) -> dict[str, int]:
    sizes = _above_least(signature, sizes_above)
    return {axis: signature.clip(axis, size) for axis, size in sizes.items()}


def _above_least(signature: Signature, sizes: Sequence[int]) -> dict[str, int]:
    """Sizes of the axes, each as far above the smallest one, or times the multiple, as above 1."""
    pairs = zip(signature.axes, sizes, strict=False)
    return {
        axis: size * signature.length_multiples[axis]
        if axis in signature.length_multiples
        else size + signature.min_lengths.get(axis, 1) - 1
        for axis, size in pairs
    }


def outputs(module: nn.Module, signature: Signature, inputs: Arrays, *, accepts_nan: bool = False) -> Arrays:
    """The outputs of a module by name.

    Raises:
        ExportError: The module fails.
        NotANumberError: An output is not a number, and that is not accepted.
    """
    return arrays_by_name(signature, inputs, _try(module, signature, inputs, accepts_nan=accepts_nan))


def _run(module: nn.Module, signature: Signature, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
    return _try(module, signature, random_inputs(signature, sizes, rng()))


def _takes(module: nn.Module, signature: Signature, sizes: Mapping[str, int]) -> bool:
    """Whether the module runs with these sizes."""
    return _attempt(partial(_run, module, signature, sizes)) is not None


def _attempt(run: Callable[[], Result]) -> Result | None:
    """What a run of a module returns; None if the module fails."""
    try:
        return run()
    except NotANumberError:
        raise
    except ExportError:
        return None


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
    except ExportError:  # of an ONNX file
        raise
    except Exception as error:  # a module may raise anything
        raise failure(inputs, error) from error
    if any(result.numel() == 0 for result in results):
        raise ExportError(f"the module returns an output without elements for {shapes_of(inputs)}")
    for index, result in enumerate(results):
        if not accepts_nan and bool(result.isnan().any()):
            name = signature.outputs[index].name if signature.outputs else str(index)
            raise NotANumberError(
                f"output {name!r}: the module returns NaN for finite inputs, which proves nothing. Give "
                f"examples (example_inputs and examples=[...], or the golden vectors of an ONNX file) with "
                f"values as requests have them: they are tested in the range of the examples"
            )
    return results


def failure(inputs: Arrays | Mapping[str, Tensor], error: Exception) -> ExportError:
    """What a module raised for inputs."""
    details = "".join(traceback.format_exception(error))
    message = f"the module fails for {shapes_of(inputs)}{user_line(details)}: {first_line(error)}"
    return ExportError(message, details)


def fast_path_notes(module: AdaptedModule, signature: Signature, tolerance: Tolerance) -> list[str]:
    """A note if PyTorch's fused transformer layers return something else than the operators they replace.

    They do so for rows that a mask inside the module hides, which may be rows of zeros, or of the id 0.
    """
    inputs = random_inputs(signature, first_sizes(signature), rng())
    for spec in signature.inputs:
        if isinstance(spec.length_axis, str):
            inputs[spec.name][:, 1 + inputs[spec.name].shape[1] // 2 :] = 0
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
