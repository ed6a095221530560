"""Compares exported graphs with eager PyTorch over a grid of shapes, and records golden vectors."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import onnxruntime
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernelError
from torch import nn

from artifact.encoder import EMBEDDING
from artifact.golden import Arrays, GoldenCase
from artifact.manifest import BLOCK_ROWS, IN_BLOCKS, GraphKind
from artifact.tolerance import Tolerance, least_cosine
from export.errors import ParityError
from export.signature import MASK_HEADS_AXIS, QUERY_AXIS, Signature, random_inputs, run_eager

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
    between two embeddings; None for a graph without them.
    """

    graph: GraphKind
    sizes: Mapping[str, int]
    max_abs_error: float
    within_tolerance: bool
    min_cosine: float | None = None


@dataclass(frozen=True)
class ParityReport:
    """The reference, the candidate, and their largest difference.

    `max_abs_error` is None and `cases` is empty if this machine lacks kernels for the graphs. Servers still
    replay the golden vectors.
    """

    reference: str
    candidate: str
    tolerance: Mapping[str, float]
    max_abs_error: float | None
    min_cosine: float | None
    cases: tuple[ParityCase, ...]


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


def compare(module: nn.Module, signature: Signature, model: str, tolerance: Tolerance) -> list[ParityCase]:
    """Runs a graph in ONNX Runtime on CPU and in eager PyTorch over the parity grid.

    Args:
        module: The module that was exported.
        signature: The graph's inputs and outputs.
        model: Path of the ONNX file.
        tolerance: Largest accepted difference of each case.

    Returns:
        The cases; none if ONNX Runtime has no CPU kernel for an operator of the graph.
    """
    try:
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    except NoKernelError:
        return []
    names = [spec.name for spec in signature.outputs]
    cases = []
    for sizes, case in grid_cases(module, signature, PARITY_GRID):
        outputs: Arrays = dict(zip(names, session.run(names, case.inputs), strict=True))
        pairs = [(outputs[name], case.outputs[name]) for name in names]
        error = max(tolerance.error(*pair) for pair in pairs)
        passed = all(tolerance.holds(*pair) for pair in pairs)
        cosine = least_cosine(outputs[EMBEDDING], case.outputs[EMBEDDING]) if EMBEDDING in names else None
        cases.append(ParityCase(signature.kind, sizes, error, passed, cosine))
    return cases


def report(cases: list[ParityCase], tolerance: Tolerance) -> ParityReport:
    """Summarises the cases.

    Raises:
        ParityError: A case exceeds the tolerance.
    """
    for case in cases:
        if not case.within_tolerance:
            raise ParityError(
                f"graph {case.graph} at {dict(case.sizes)} differs from eager PyTorch by "
                f"{case.max_abs_error:.3g}; the tolerance is {tolerance}. Large scores amplify rounding: "
                f"state a wider tolerance for a module whose weights produce them"
            )
    return ParityReport(
        reference=f"eager PyTorch {torch.__version__}, CPU, float32",
        candidate=f"ONNX Runtime {onnxruntime.__version__}, CPUExecutionProvider",
        tolerance=tolerance.model_dump(),
        max_abs_error=max((case.max_abs_error for case in cases), default=None),
        min_cosine=min((case.min_cosine for case in cases if case.min_cosine is not None), default=None),
        cases=tuple(cases),
    )


def as_json(parity: ParityReport) -> dict[str, object]:
    """The report as JSON values."""
    return asdict(parity)
