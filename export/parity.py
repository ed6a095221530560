"""Compares exported graphs with eager PyTorch over a grid of shapes, and records golden vectors."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernelError
from torch import nn

from attention_serving.artifact.encoder import EMBEDDING
from attention_serving.artifact.golden import Arrays, GoldenCase
from attention_serving.artifact.manifest import BATCH_AXIS, BLOCK_ROWS, IN_BLOCKS, GraphKind
from attention_serving.artifact.tolerance import Tolerance, cosines
from attention_serving.export.errors import ExportError, ParityError
from attention_serving.export.signature import (
    MASK_HEADS_AXIS,
    QUERY_AXIS,
    Signature,
    random_inputs,
    run_eager,
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
# The operators in blocks are those of other graphs: a few rows show that the blocks are cut and joined.
BLOCK_GOLDEN_GRID = GOLDEN_GRID[:2]


@dataclass(frozen=True)
class ParityCase:
    """One comparison.

    `max_abs_error` is the largest |ONNX - eager| of any output, `min_cosine` the smallest cosine of the angle
    between two embeddings; None for a graph without them. `text` is the text of a case whose outputs a
    reference computed, and not eager PyTorch.
    """

    graph: GraphKind
    sizes: Mapping[str, int]
    max_abs_error: float
    within_tolerance: bool
    min_cosine: float | None = None
    text: str | None = None


def grid_cases(
    module: nn.Module, signature: Signature, grid: tuple[tuple[int, int, int], ...]
) -> Iterator[tuple[dict[str, int], GoldenCase]]:
    """Random inputs and eager outputs of one graph for every point of a grid."""
    rng = np.random.default_rng(SEED)
    for index, point in enumerate(grid):
        sizes = _sizes(signature, point)
        # Masks for all heads and masks for each head take turns.
        if MASK_HEADS_AXIS in sizes:
            sizes[MASK_HEADS_AXIS] = signature.num_heads if index % 2 else 1
        if signature.kind in IN_BLOCKS.values():
            # Sequences of 7 rows and more have three blocks, one of which has fewer rows than the others.
            sizes[BLOCK_ROWS] = sizes[QUERY_AXIS] // 3 + 1
        inputs = random_inputs(signature, sizes, rng)
        yield sizes, GoldenCase(signature.kind, inputs, run_eager(module, signature, inputs))


def _shape(case: GoldenCase) -> dict[str, int]:
    """The sizes of a case of one sequence of tokens."""
    batch, length = next(iter(case.inputs.values())).shape
    return {BATCH_AXIS: batch, QUERY_AXIS: length}


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
    grid = BLOCK_GOLDEN_GRID if signature.kind in IN_BLOCKS.values() else GOLDEN_GRID
    return [case for _, case in grid_cases(module, signature, grid)]


def compare(
    module: nn.Module,
    signature: Signature,
    model: str,
    tolerance: Tolerance,
    texts: Mapping[str, GoldenCase] | None = None,
) -> list[ParityCase]:
    """Runs a graph in ONNX Runtime on CPU and in eager PyTorch over the parity grid.

    Args:
        module: The module that was exported.
        signature: The graph's inputs and outputs.
        model: Path of the ONNX file.
        tolerance: Largest accepted difference of each case.
        texts: By text, the inputs of this graph and what a reference computed.

    Returns:
        The cases; none if ONNX Runtime has no CPU kernel for an operator of the graph.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL_ONLY
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except NoKernelError:
        return []
    except Exception as failure:  # ONNX Runtime raises many types
        raise _unusable(signature, "does not load", failure) from failure
    names = [spec.name for spec in signature.outputs]
    cases = []
    of_texts = ((_shape(case), case, text) for text, case in (texts or {}).items())
    of_grid = ((*each, None) for each in grid_cases(module, signature, PARITY_GRID))
    for sizes, case, text in chain(of_grid, of_texts):
        try:
            outputs: Arrays = dict(zip(names, session.run(names, case.inputs), strict=True))
        except Exception as failure:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in case.inputs.items())
            raise _unusable(signature, f"does not run for {shapes}", failure) from failure
        pairs = [(outputs[name], case.outputs[name]) for name in names]
        error = max(tolerance.error(*pair) for pair in pairs)
        passed = all(tolerance.holds(*pair) for pair in pairs)
        cosine = None
        if EMBEDDING in names:
            cosine = float(cosines(outputs[EMBEDDING], case.outputs[EMBEDDING]).min())
        cases.append(ParityCase(signature.kind, sizes, error, passed, cosine, text))
    return cases


def _unusable(signature: Signature, what: str, error: Exception) -> ExportError:
    """A failure of ONNX Runtime in one line; the rest is in a file."""
    text = str(error).strip()
    return ExportError.with_details(
        f"graph {signature.kind} {what} in ONNX Runtime: {text.splitlines()[0]}. Compute it with other "
        f"operators of PyTorch, or report the file below",
        text,
    )


def report(cases: list[ParityCase], tolerance: Tolerance, reference: str = "") -> dict[str, Any]:
    """The reference, that of texts, the candidate, their largest difference and all cases, as JSON values.

    The difference is None and there is no case if this machine lacks kernels for the graphs. Servers still
    replay the golden vectors.

    Raises:
        ParityError: A case exceeds the tolerance.
    """
    failed = next((case for case in cases if not case.within_tolerance), None)
    if failed is not None:
        case, judge = f"at {dict(failed.sizes)}", "eager PyTorch"
        if failed.text is not None:
            case, judge = f"for the text {failed.text[:60]!r}", reference
        found = f"{failed.max_abs_error:.3g}"
        if failed.min_cosine is not None:
            found += f" (cosine {failed.min_cosine:.4f})"
        raise ParityError(
            f"graph {failed.graph} {case} differs from {judge} by "
            f"{found}; the tolerance is {tolerance}. {_advice(failed, cases, tolerance)}"
        )
    of_texts = [case.min_cosine for case in cases if case.text is not None and case.min_cosine is not None]
    least = [case.min_cosine for case in cases if case.min_cosine is not None]
    return {
        "reference": f"eager PyTorch {torch.__version__}, CPU, float32",
        "candidate": f"ONNX Runtime {onnxruntime.__version__}, CPUExecutionProvider",
        "tolerance": tolerance.model_dump(),
        "max_abs_error": max((case.max_abs_error for case in cases), default=None),
        "min_cosine": min(least, default=None),
        "texts": {
            "reference": reference,
            "count": len(of_texts),
            "min_cosine": min(of_texts),
            "mean_cosine": sum(of_texts) / len(of_texts),
        }
        if of_texts
        else None,
        "cases": [asdict(case) for case in cases],
    }


def _advice(failed: ParityCase, cases: list[ParityCase], tolerance: Tolerance) -> str:
    """Rounding grows little by little with the sizes; another computation differs at once."""
    equal = [each.max_abs_error for each in cases if each.within_tolerance and each.graph is failed.graph]
    if failed.max_abs_error <= 10 * max(equal, default=10 * max(tolerance.atol, tolerance.rtol)):
        return (
            "Large scores amplify rounding: state a wider tolerance for a module whose weights produce them"
        )
    return (
        "This is more than rounding: the module computes something else when it is traced. It may branch on "
        "a length, such as `if x.shape[1] > 8`, or on being traced, or keep values between calls. Compute "
        "the same for all lengths; pass the largest as max_length if there is one"
    )
