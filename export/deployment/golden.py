"""Golden vectors of one graph in NumPy's own format, for programs that have NumPy only."""

from pathlib import Path

import numpy as np

from attention_serving.artifact.golden import load_golden
from attention_serving.artifact.manifest import GraphKind, Manifest

GOLDEN_ARRAYS_FILE = "golden.npz"


def write_golden_arrays(artifact: Path, manifest: Manifest, kind: GraphKind, folder: Path) -> Path:
    """Writes `<index>/inputs/<name>` and `<index>/outputs/<name>` for each golden case of a graph.

    Raises:
        ArtifactError: The artifact's golden vectors are damaged.
    """
    cases = [case for case in load_golden(artifact / manifest.golden) if case.graph is kind]
    arrays = {
        f"{index}/{side}/{name}": array
        for index, case in enumerate(cases)
        for side, values in (("inputs", case.inputs), ("outputs", case.outputs))
        for name, array in values.items()
    }
    path = folder / GOLDEN_ARRAYS_FILE
    np.savez(path, **arrays)  # type: ignore[arg-type]  # names that are no identifiers
    return path
