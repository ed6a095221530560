"""Golden vectors: inputs of each graph and the outputs of eager PyTorch, which every server replays."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from artifact.manifest import ArtifactError, GraphKind

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class GoldenCase:
    """Inputs of one graph and the outputs of eager PyTorch for them, by name."""

    graph: GraphKind
    inputs: Arrays
    outputs: Arrays


def load_golden(path: Path) -> list[GoldenCase]:
    """Reads golden vectors from a file of tensors named as in `golden_tensors`, ordered by name.

    Raises:
        ArtifactError: The file is absent or damaged.
    """
    try:
        tensors = load_file(path)
        return _group_golden(tensors)
    except (OSError, SafetensorError, ValueError) as error:
        raise ArtifactError(f"{path}: {error}") from error


def _group_golden(tensors: Arrays) -> list[GoldenCase]:
    cases: dict[str, GoldenCase] = {}
    for key, array in sorted(tensors.items()):
        graph, index, side, name = key.split("/")
        case = cases.setdefault(f"{graph}/{index}", GoldenCase(GraphKind(graph), {}, {}))
        (case.inputs if side == "inputs" else case.outputs)[name] = array
    return list(cases.values())


def golden_tensors(cases: list[GoldenCase]) -> Mapping[str, NDArray[Any]]:
    """Names the tensors of golden cases: `<graph>/<index>/<inputs or outputs>/<name>`."""
    return {
        f"{case.graph}/{index}/{side}/{name}": np.ascontiguousarray(array)
        for index, case in enumerate(cases)
        for side, arrays in (("inputs", case.inputs), ("outputs", case.outputs))
        for name, array in arrays.items()
    }
