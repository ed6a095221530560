"""Compares exported graphs with eager PyTorch over a grid of shapes, and records golden vectors."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernelError
from torch import nn

from attention_serving.artifact.encoder import (
    CONTEXT_VECTORS,
    EMBEDDING,
    SPARSE_EMBEDDING,
    TOKEN_WEIGHTS,
    EncoderFacts,
    quantise,
    tolerance_of,
)
from attention_serving.artifact.golden import Arrays, GoldenCase
from attention_serving.artifact.manifest import (
    BATCH_AXIS,
    BLOCK_ROWS,
    EAGER,
    IN_BLOCKS,
    OF_RERANKERS,
    GraphKind,
)
from attention_serving.artifact.runtime import unsafe_optimizers
from attention_serving.artifact.tolerance import Tolerance, cosines
from attention_serving.export.assumptions import Assumption, Place
from attention_serving.export.errors import ExportError, ParityError
from attention_serving.export.signature import (
    MASK_HEADS_AXIS,
    QUERY_AXIS,
    Signature,
    random_inputs,
    run_eager,
    shapes_of,
    sizes_of,
)

# ONNX Runtime's own log repeats what its exceptions say.
FATAL_ONLY = 4
SEED = 20_170_612
# (batch, query length, key length); self-attention reads the first two. Export saw lengths 3 and 5 only.
PARITY_GRID = (
    (1, 1, 1),
    (1, 2, 7),
    (3, 1, 5),
    (1, 7, 2),
    (3, 7, 7),
    (2, 64, 65),
    (1, 128, 513),
    (3, 128, 1),
    (1, 513, 128),
)
LONGEST = max(max(point) for point in PARITY_GRID)
GOLDEN_GRID = ((1, 1, 1), (2, 7, 12), (1, 65, 64))
# The operators in blocks are those of other graphs: a few rows show that the blocks are cut and joined. Keys
# and values of prefixes take much memory.
BLOCK_GOLDEN_GRID = GOLDEN_GRID[:2]
# Longer sequences take long to compare.
QUICK_LENGTH = 2048
# Special values: where they are compared, the factor of large ones, and the relative change of inputs
# that shows how much they amplify rounding.
SPECIAL_VALUES_POINT, LARGE_FACTOR, ROUNDING = (2, 12, 9), 30, 2.0**-18

# How many of the nearest texts are compared with those of quantised embeddings.
NEAREST = 10
# Outputs of text encoders: the first one of a graph has its cosines in the report. Of token ids with the
# largest weights, so many are compared as a set.
HEADS, TOP_IDS = (EMBEDDING, SPARSE_EMBEDDING, TOKEN_WEIGHTS, CONTEXT_VECTORS), 10

FILE_ADVICE = (
    "Either the golden vectors are of other weights or inputs than the file, or ONNX Runtime computes it "
    "with another rounding: if the difference is small enough for you, state a wider tolerance"
)


@dataclass(frozen=True)
class ParityCase:
    """One comparison.

    `max_abs_error` is the largest |ONNX - eager| of any output, `min_cosine` the smallest cosine of the angle
    between two embeddings; None for a graph without them. `text` is the text of a case whose outputs a
    reference computed, and not eager PyTorch. `judge` is what computed them if the report has another judge.
    """

    graph: GraphKind
    sizes: Mapping[str, int]
    max_abs_error: float
    within_tolerance: bool
    min_cosine: float | None = None
    text: str | None = None
    judge: str | None = None


def grid_cases(
    module: nn.Module, signature: Signature, grid: tuple[tuple[int, int, int], ...]
) -> Iterator[tuple[dict[str, int], GoldenCase]]:
    """Random inputs and eager outputs of one graph for every point of a grid."""
    return _cases_at(module, signature, [_sizes(signature, point) for point in grid])


def _cases_at(
    module: nn.Module, signature: Signature, points: Iterable[Mapping[str, int]]
) -> Iterator[tuple[dict[str, int], GoldenCase]]:
    """Random inputs and eager outputs of one graph for sizes of its symbolic axes."""
    rng = np.random.default_rng(SEED)
    for index, point in enumerate(points):
        sizes = dict(point)
        # Masks for all heads and masks for each head take turns.
        if MASK_HEADS_AXIS in sizes:
            sizes[MASK_HEADS_AXIS] = signature.num_heads if index % 2 else 1
        if signature.kind in IN_BLOCKS.values():
            # Sequences of 7 rows and more have three blocks, one of which has fewer rows than the others.
            sizes[BLOCK_ROWS] = sizes[QUERY_AXIS] // 3 + 1
        inputs = random_inputs(signature, sizes, rng)
        yield sizes, GoldenCase(signature.kind, inputs, run_eager(module, signature, inputs))


def _sizes(signature: Signature, point: tuple[int, int, int]) -> dict[str, int]:
    """A size for each symbolic axis: the batch, then sequence axes in the order of the inputs."""
    batch, query_length, key_length = point
    sizes = {
        axis: signature.clip(axis, key_length if at else query_length)
        for at, axis in enumerate(signature.sequence_axes)
    }
    return {axis: sizes.get(axis, batch) for axis in signature.axes}


def golden_cases(module: nn.Module, signature: Signature) -> list[GoldenCase]:
    """The cases stored in the artifact for servers to replay."""
    is_large = signature.kind in (*IN_BLOCKS.values(), *OF_RERANKERS)
    grid = BLOCK_GOLDEN_GRID if is_large else GOLDEN_GRID
    return [case for _, case in grid_cases(module, signature, grid)]


def open_session(file: Path) -> onnxruntime.InferenceSession:
    """A session of an ONNX file on the CPU, which raises what ONNX Runtime raises."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL_ONLY
    return onnxruntime.InferenceSession(
        file, options, providers=["CPUExecutionProvider"], disabled_optimizers=unsafe_optimizers(file)
    )


class GraphRunner:
    """Runs a graph in ONNX Runtime on the CPU, and compares it with eager PyTorch."""

    def __init__(self, module: nn.Module, signature: Signature, model: Path, tolerance: Tolerance) -> None:
        """Opens the graph.

        Args:
            module: The module that was exported.
            signature: The graph's inputs and outputs.
            model: Path of the ONNX file.
            tolerance: Largest accepted difference of each case.

        Raises:
            NoKernelError: ONNX Runtime has no CPU kernel for an operator of the graph.
            ExportError: The graph does not load.
        """
        self._module, self._signature, self._tolerance = module, signature, tolerance
        try:
            self._session = open_session(model)
        except NoKernelError:
            raise
        except Exception as failure:  # ONNX Runtime raises many types
            raise _unusable(signature, "does not load", failure) from failure

    def cases(
        self,
        texts: Mapping[str, GoldenCase],
        long_cases: Iterable[tuple[Mapping[str, int], GoldenCase]],
        *,
        special_values: bool,
    ) -> Iterator[ParityCase]:
        """Compares the graph over the parity grid and beyond.

        Args:
            texts: By text, the inputs of this graph and what a reference computed.
            long_cases: Sizes beyond the grid, and what eager PyTorch computes for them.
            special_values: Whether zeros, equal rows and large values are compared too.
        """
        for sizes, case in grid_cases(self._module, self._signature, PARITY_GRID):
            yield self._measure(sizes, case)
        for long_sizes, case in long_cases:
            yield self._measure_beyond_rounding(long_sizes, case)
        for text, case in texts.items():
            yield self._measure(sizes_of(self._signature.inputs, case.inputs), case, text)
        if special_values:
            yield from self._cases_of_special_values()

    def compare(self, cases: Iterable[GoldenCase]) -> Iterator[ParityCase]:
        """Compares the graph with cases that were computed before."""
        specs = self._signature.inputs
        return (self._measure(sizes_of(specs, case.inputs), case) for case in cases)

    def _cases_of_special_values(self) -> Iterator[ParityCase]:
        """Zeros, equal rows and large values, as far as eager PyTorch returns numbers for them."""
        sizes = _sizes(self._signature, SPECIAL_VALUES_POINT)
        inputs = random_inputs(self._signature, sizes, np.random.default_rng(SEED))
        for change in (np.zeros_like, _repeat_first_row, _enlarge):
            changed = inputs | {name: change(inputs[name]) for name in self._real_inputs}
            eager = run_eager(self._module, self._signature, changed)
            if not all(np.isfinite(array).all() for array in eager.values()):
                continue
            yield self._measure_beyond_rounding(sizes, GoldenCase(self._signature.kind, changed, eager))

    @property
    def _real_inputs(self) -> list[str]:
        return [spec.name for spec in self._signature.inputs if spec.data_type == "float32"]

    def _measure_beyond_rounding(self, sizes: Mapping[str, int], case: GoldenCase) -> ParityCase:
        """Compares a case of large values or long sequences, which amplify rounding.

        How much is measured by a change of the inputs in the last digits, which the tolerance does not cover.
        """
        measured, rng = self._measure(sizes, case), np.random.default_rng(SEED)
        if measured.within_tolerance:
            return measured
        noisy = dict(case.inputs)
        for name in self._real_inputs:
            noise = 1 + ROUNDING * rng.uniform(-1, 1, noisy[name].shape)
            noisy[name] = (noisy[name] * noise).astype(np.float32)
        moved = run_eager(self._module, self._signature, noisy)
        rounding = max(self._tolerance.error(moved[name], eager) for name, eager in case.outputs.items())
        return dataclasses.replace(measured, within_tolerance=measured.max_abs_error <= rounding)

    def loses_nan(self) -> bool:
        """Whether a NaN in an input makes NaN of other results than in eager PyTorch.

        Some kernels of ONNX Runtime ignore NaN, such as that of a maximum.
        """
        inputs = random_inputs(
            self._signature, _sizes(self._signature, SPECIAL_VALUES_POINT), np.random.default_rng(SEED)
        )
        for name in self._real_inputs:
            damaged = inputs[name].copy()
            middle = [size // 2 for size in damaged.shape[1:2]]
            damaged[(0, *middle, *(0 for _ in damaged.shape[2:]))] = np.nan
            names = [spec.name for spec in self._signature.outputs]
            try:
                eager = run_eager(self._module, self._signature, {**inputs, name: damaged})
                outputs = self._session.run(names, {**inputs, name: damaged})
            except Exception:  # either may refuse it
                return True
            pairs = [(output, eager[name]) for name, output in zip(names, outputs, strict=True)]
            if not all(np.array_equal(np.isnan(output), np.isnan(expected)) for output, expected in pairs):
                return True
        return False

    def _measure(self, sizes: Mapping[str, int], case: GoldenCase, text: str | None = None) -> ParityCase:
        names = [spec.name for spec in self._signature.outputs]
        try:
            outputs: Arrays = dict(zip(names, self._session.run(names, case.inputs), strict=True))
        except Exception as failure:
            raise _unusable(
                self._signature, f"does not run for {shapes_of(case.inputs)}", failure
            ) from failure
        pairs = {name: (outputs[name], case.outputs[name]) for name in names}
        error = max(self._tolerance.error(*pair) for pair in pairs.values())
        passed = all(tolerance_of(name, pairs, self._tolerance).holds(*pair) for name, pair in pairs.items())
        if SPARSE_EMBEDDING in names and self._tolerance.cosine is None:
            passed = passed and has_same_top(*pairs[SPARSE_EMBEDDING], self._tolerance)
        cosine, head = None, next((name for name in HEADS if name in names), CONTEXT_VECTORS)
        if head in names and (text is not None or head != CONTEXT_VECTORS):
            cosine = float(cosines(*pairs[head]).min())
        return ParityCase(self._signature.kind, sizes, error, passed, cosine, text)

    def limits(self, assumptions: Iterable[Assumption]) -> dict[str, tuple[int, Place]]:
        """The largest lengths by axis that follow from what the trace assumes, and where.

        Where an assumption does not hold, the graph is compared with eager PyTorch: most assumptions change
        no result.

        Raises:
            ExportError: The graph is wrong for sizes that a largest length does not exclude, or for short
                sequences too.
        """
        limits = dict[str, tuple[int, Place]]()
        # Those about one axis first, because longer sequences violate them together with others.
        for assumption in sorted(assumptions, key=lambda assumption: len(assumption.axes)):
            largest_lengths = dict(self._signature.max_lengths) | {axis: n for axis, (n, _) in limits.items()}
            violations = assumption.violations(
                dataclasses.replace(self._signature, max_lengths=largest_lengths)
            )
            if not violations:
                continue
            # The smallest, and the first of each order of magnitude that does not take long.
            magnitudes = {max(sizes).bit_length(): sizes for sizes in reversed(violations)}
            quick = [sizes for sizes in sorted(magnitudes.values()) if max(sizes) <= QUICK_LENGTH]
            tries = dict.fromkeys([*violations[:2], *quick])
            wrong = next((sizes for sizes in tries if not self._is_equal_at(assumption.axes, sizes)), None)
            if wrong is None:
                continue
            axis = assumption.axes[0]
            excludes = len(assumption.axes) == 1 and axis != BATCH_AXIS
            largest = violations[0][0] - 1
            is_limit = excludes and len(violations) == violations[-1][0] - largest
            if is_limit and largest >= LONGEST and self._is_equal_at((axis,), (largest,)):
                limits[axis] = largest, assumption.place
                continue
            where = ", ".join(f"{size} of {name}" for name, size in zip(assumption.axes, wrong, strict=True))
            advice = f", or pass max_length={largest}" if is_limit and largest > 1 else ""
            raise ExportError(
                f"graph {self._signature.kind}: the module branches on a size, or fixes it, at "
                f"{assumption.place}: for {where} it computes something else than the graph. Compute the "
                f"same for all sizes{advice}"
            )
        return limits

    def _is_equal_at(self, axes: Sequence[str], sizes: Sequence[int]) -> bool:
        """Whether the graph equals eager PyTorch at some sizes of axes; not if either fails."""
        usual = {axis: self._signature.clip(axis, 5 + at) for at, axis in enumerate(self._signature.axes)}
        point = usual | {BATCH_AXIS: 1} | dict(zip(axes, sizes, strict=True))
        try:
            ((point, case),) = _cases_at(self._module, self._signature, [point])
            return self._measure_beyond_rounding(point, case).within_tolerance
        except Exception:  # the module may raise anything
            return False


def has_same_top(values: NDArray[Any], eager: NDArray[Any], tolerance: Tolerance) -> bool:
    """Whether the ids of the largest weights of sparse embeddings (B, V) are the same.

    Rows whose last weight among them and next one differ by no more than the tolerance are not compared.
    """
    if eager.shape[1] <= TOP_IDS:
        return True
    top, expected = (np.argsort(-rows, axis=1, kind="stable") for rows in (values, eager))
    last, following = (np.take_along_axis(eager, expected[:, [at]], 1) for at in (TOP_IDS - 1, TOP_IDS))
    differ = (last - following > tolerance.atol + tolerance.rtol * np.abs(last))[:, 0]
    top, expected = (np.sort(ids[differ, :TOP_IDS], axis=1) for ids in (top, expected))
    return np.array_equal(top, expected)


def _repeat_first_row(rows: NDArray[Any]) -> NDArray[Any]:
    return np.broadcast_to(rows[:, :1] if rows.ndim > 1 else rows[:1], rows.shape).copy()


def _enlarge(rows: NDArray[Any]) -> NDArray[Any]:
    return rows * np.float32(LARGE_FACTOR)


def _unusable(signature: Signature, what: str, error: Exception) -> ExportError:
    """A failure of ONNX Runtime in one line; the rest is in a file."""
    text = str(error).strip()
    return ExportError(
        f"graph {signature.kind} {what} in ONNX Runtime: {text.splitlines()[0]}. Compute it with other "
        f"operators of PyTorch, or report the file below",
        text,
    )


def report(
    cases: list[ParityCase],
    tolerance: Tolerance,
    reference: str = "",
    *,
    judge: str = "",
    branches: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The judge, the reference of texts, the candidate, the largest difference and all cases, as JSON values.

    Beside them stand branches on values that were followed as traced, and other notes.

    The difference is None and there is no case if this machine lacks kernels for the graphs. Servers still
    replay the golden vectors.

    Raises:
        ParityError: A case exceeds the tolerance.
    """
    failed = next((case for case in cases if not case.within_tolerance), None)
    if failed is not None:
        case, expected = f"at {dict(failed.sizes)}", failed.judge or judge or EAGER
        if failed.text is not None:
            case, expected = f"for the text {failed.text[:60]!r}", reference
        difference = f"{failed.max_abs_error:.3g}"
        if failed.min_cosine is not None:
            difference += f" (cosine {failed.min_cosine:.4f})"
        raise ParityError(
            f"graph {failed.graph} {case} differs from {expected} by "
            f"{difference}; the tolerance is {tolerance}. "
            f"{FILE_ADVICE if judge else _advice(failed, cases, tolerance)}"
        )
    of_texts = [case.min_cosine for case in cases if case.text is not None and case.min_cosine is not None]
    least = [case.min_cosine for case in cases if case.min_cosine is not None]
    return {
        "reference": judge or f"{EAGER} {torch.__version__}, CPU, float32",
        "candidate": f"ONNX Runtime {onnxruntime.__version__}, CPUExecutionProvider",
        "tolerance": tolerance.model_dump(),
        "max_abs_error": max((case.max_abs_error for case in cases if case.judge is None), default=None),
        "min_cosine": min(least, default=None),
        "texts": {
            "reference": reference,
            "count": len(of_texts),
            "min_cosine": min(of_texts),
            "mean_cosine": sum(of_texts) / len(of_texts),
        }
        if of_texts
        else None,
        "branches_as_traced": list(branches),
        "notes": list(notes),
        "cases": [asdict(case) for case in cases],
    }


def nearest_overlaps(texts: Sequence[GoldenCase], facts: EncoderFacts) -> dict[str, float]:
    """Of the nearest texts of each text, how many stay with quantised embeddings, on average.

    Nearest are those of the largest dot products, and with bits those of the smallest Hamming distances.
    """
    rows = np.concatenate([case.outputs[EMBEDDING] for case in texts])
    largest = facts.quantisation_ranges[facts.embedding_width]
    integers = quantise(rows, "INT8", largest).astype(np.float64)
    # The product of two rows of signs is their width minus two times the distance.
    candidates, exact = {"int8": integers, "bits": np.where(rows > 0, 1.0, -1.0)}, _nearest(rows)
    overlaps = {name: (exact & _nearest(quantised)).sum() for name, quantised in candidates.items()}
    return {name: float(overlap / len(rows)) for name, overlap in overlaps.items()}


def _nearest(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """For each row, which others are the `NEAREST` of the largest dot products, (B, B)."""
    products = rows @ rows.T
    np.fill_diagonal(products, -np.inf)
    order = np.argsort(-products, axis=1, kind="stable")[:, :NEAREST]
    nearest: NDArray[np.bool_] = (order[:, :, np.newaxis] == np.arange(len(rows))).any(axis=1)
    return nearest


def _advice(failed: ParityCase, cases: list[ParityCase], tolerance: Tolerance) -> str:
    """Rounding grows little by little with the sizes; another computation differs at once."""
    equal = [case.max_abs_error for case in cases if case.within_tolerance and case.graph is failed.graph]
    if failed.max_abs_error <= 10 * max(equal, default=10 * max(tolerance.atol, tolerance.rtol)):
        return (
            "Large scores and sines of large angles amplify rounding: keep a table of positions in a buffer, "
            "pass a smaller max_length, or state a wider tolerance"
        )
    return (
        "This is more than rounding: the module computes something else when it is traced. It may branch on "
        "a length, such as `if x.shape[1] > 8`, or on being traced, or keep values between calls. Compute "
        "the same for all lengths; pass the largest as max_length if there is one"
    )
