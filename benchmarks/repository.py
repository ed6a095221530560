"""Where the measured models lie."""

from pathlib import Path

from benchmarks.workload import Model

VERSION = 1
GRAPH = "model.onnx"
"""The graph without masks and lengths, which the peers are given."""


def artifact(repository: Path, model: Model) -> Path:
    """The folder of a model's artifact."""
    return repository / model.name / str(VERSION)
