"""What is needed to start a peer."""

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.workload import Model


@dataclass(frozen=True)
class Launch:
    """A model to serve.

    Attributes:
        home: Folder of the peers' installations.
        graph: The ONNX file; its external weights, if any, are beside it.
        folder: An empty folder for the peer's own files.
        port: gRPC port; the four ports after it are free as well.
    """

    home: Path
    graph: Path
    model: Model
    folder: Path
    port: int


@dataclass(frozen=True)
class Command:
    """A command line, and the environment variables to add for it."""

    arguments: list[str | Path]
    environment: dict[str, str] = field(default_factory=dict)
