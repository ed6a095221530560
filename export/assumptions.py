"""What a trace assumes of the sizes of its axes, and the sizes at which that does not hold.

The tracer follows one side of each branch on a size, such as `if x.shape[1] > 1024`, and notes the condition.
A graph of other sizes computes what the module would not. Each condition is evaluated for the sizes that
requests may have; where it does not hold, the graph is compared with eager PyTorch.
"""

import itertools
import linecache
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from attention_serving.artifact.manifest import BATCH_AXIS
from attention_serving.export.signature import PositionalModule, Signature

# Sizes of the batch that are tried, and the largest length without a stated one: the defaults of servers.
MOST_SEQUENCES, LONGEST_SERVED = 256, 8192
# Lengths that are combined where a condition is about several axes, beside those around its numbers.
COMBINED = (1, 2, 3, 4, 5, 7, 8, 10, 16, 33, 64, 100, 128, 513, 1024, 1025, 2048, 4096, LONGEST_SERVED)
# By number of axes, of which there are five at most, how many sizes of each.
MOST_COMBINED = (0, 0, 60, 15, 8, 5)
TORCH_FOLDER, EXPORT_FOLDER = torch.__path__[0], str(Path(__file__).parent)
_SOURCE = re.compile(r"\[(\d+)\]\.size\(\)\[(\d+)\]")


class Place(NamedTuple):
    """A line of source code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {linecache.getline(self.file, self.line).strip()}"


def innermost_place() -> Place:
    """The innermost line of a module that runs now, of PyTorch's own layers or of the user's."""
    frame = sys._getframe(1)
    skipped = (*(f"{TORCH_FOLDER}/{name}" for name in ("overrides.py", "_tensor.py")), EXPORT_FOLDER)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


def user_place() -> Place | None:
    """The innermost line of the module that runs now and is not PyTorch's; None if no module runs.

    Of a module of PyTorch itself, the innermost line of its layers.
    """
    frame: FrameType | None = sys._getframe(1)
    layer = None
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code is PositionalModule.forward.__code__:
            return layer
        if not file.startswith((TORCH_FOLDER, EXPORT_FOLDER)):
            return Place(file, frame.f_lineno)
        if layer is None and file.startswith(f"{TORCH_FOLDER}/nn/modules/"):
            layer = Place(file, frame.f_lineno)
        frame = frame.f_back
    return None


def user_line(details: str) -> str:
    """The last line of the user's code that a traceback names: the end of a phrase."""
    lines = re.findall(r'File "([^"<]+)", line (\d+)', details)
    skipped = (sys.prefix, sys.base_prefix, TORCH_FOLDER, EXPORT_FOLDER)
    places = [Place(file, int(line)) for file, line in lines if not file.startswith(skipped)]
    return f", at {places[-1]}" if places else ""


@dataclass(frozen=True)
class Assumption:
    """A condition on sizes that a graph was traced under.

    Attributes:
        axes: The axes that it is about.
        condition: A Python expression of `size0`, `size1`, …, the sizes of these axes.
        numbers: The numbers in it.
        place: Where the module depends on it.
    """

    axes: tuple[str, ...]
    condition: str
    numbers: tuple[int, ...] = field(compare=False)
    place: Place = field(compare=False)

    def matters(self, signature: Signature) -> bool:
        """Whether it does not hold for some sizes beside 1, which the parity grid contains."""
        return any(set(sizes) != {1} for sizes in self.violations(signature))

    def violations(self, signature: Signature) -> list[tuple[int, ...]]:
        """The sizes of `axes` that requests may have and the condition does not hold for.

        All lengths are tried where it is about one axis, and a choice of them where it is about several.
        """
        code = compile(self.condition, "<assumption>", "eval")
        columns = [self._sizes(axis, signature) for axis in self.axes]
        return [sizes for sizes in itertools.product(*columns) if not _holds(code, sizes)]

    def _sizes(self, axis: str, signature: Signature) -> Sequence[int]:
        least = signature.min_lengths.get(axis, 1)
        most = MOST_SEQUENCES if axis == BATCH_AXIS else signature.max_lengths.get(axis, LONGEST_SERVED)
        step = signature.length_multiples.get(axis, 1)
        if len(self.axes) == 1:
            return range(least, most + 1, step)
        around = {number + step for number in self.numbers for step in (-1, 0, 1)} | {*COMBINED}
        sizes = sorted(size for size in around if least <= size <= most and size % step == 0)
        return sizes[:: 1 + len(sizes) // MOST_COMBINED[len(self.axes)]]


def _holds(code: CodeType, sizes: Sequence[int]) -> bool:
    """Evaluates a condition, which the tracer has made, about numbers. One that fails does not hold."""
    names = {f"size{index}": size for index, size in enumerate(sizes)}
    try:
        return bool(eval(code, {"math": math, "torch": torch}, names))  # noqa: S307
    except Exception:  # such as a division by zero
        return False


@contextmanager
def record_assumptions(signature: Signature) -> Iterator[list[Assumption]]:
    """Records the conditions that the tracer notes while the block runs."""
    assumptions: dict[Assumption, None] = {}
    original = ShapeEnv.guard_or_defer_runtime_assert

    def record(environment: ShapeEnv, condition: Any, *args: Any, **options: Any) -> bool:
        place, axes = user_place(), _axes(environment, condition, signature)
        if axes and place is not None:  # without, the tracer repeats itself after the module has run
            assumption = _assumption(condition, axes, place)
            if assumption.condition != str(True):  # two sizes of one axis are equal
                assumptions.setdefault(assumption)
        return original(environment, condition, *args, **options)

    recorded = list[Assumption]()
    ShapeEnv.guard_or_defer_runtime_assert = record  # type: ignore[method-assign,assignment]
    try:
        yield recorded
    finally:
        ShapeEnv.guard_or_defer_runtime_assert = original  # type: ignore[method-assign]
        recorded += assumptions


def _axes(environment: ShapeEnv, condition: Any, signature: Signature) -> dict[sympy.Symbol, str]:
    """The axes by their symbols; none if the condition is not about sizes of inputs alone."""
    axes = dict[sympy.Symbol, str]()
    for symbol in sorted(condition.free_symbols, key=str):
        sources = environment.var_to_sources.get(symbol) or ()
        match = _SOURCE.search(" ".join(str(source.name) for source in sources))
        if match is None:
            return {}
        axes[symbol] = str(signature.module_inputs[int(match[1])].axes[int(match[2])])
    return axes


def _assumption(condition: Any, axes: Mapping[sympy.Symbol, str], place: Place) -> Assumption:
    names = tuple(dict.fromkeys(axes.values()))
    renamed = condition.xreplace(
        {symbol: sympy.Symbol(f"size{names.index(axis)}", integer=True) for symbol, axis in axes.items()}
    )
    numbers = tuple(int(number) for number in condition.atoms(sympy.Integer))
    return Assumption(names, PythonPrinter().doprint(renamed), numbers, place)
