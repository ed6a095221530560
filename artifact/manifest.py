"""The manifest of an artifact: what it holds, and the hashes of its files.

An artifact is a folder `<repository>/<model name>/<version>/`. Its graphs compute the same
function and differ in what they take and give, so that a request pays for nothing it does not ask.
"""

import hashlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt

from artifact.record import Record
from artifact.tolerance import Tolerance

MANIFEST_FILE = "manifest.json"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
BATCH_AXIS = "batch"
KEY_LENGTHS = "key_lengths"
POSITIONS = "positions"
ATTENTION_MASK = "attention_mask"

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class ArtifactError(Exception):
    """An artifact is damaged or unreadable; the message names the file."""


class GraphKind(StrEnum):
    """What one graph of a model takes and gives beside the model's own inputs."""

    PLAIN = "plain"
    """Nothing more: sequences of one batch have one length."""
    LENGTHS = "lengths"
    """Takes `key_lengths` int64 (B,)."""
    MASK = "mask"
    """Takes `attention_mask` bool (B, 1 or H, Tq, Tk), True = may attend."""
    WEIGHTS = "weights"
    """Takes `attention_mask` and also gives `attention_weights` (B, H, Tq, Tk)."""


class TensorSpec(Record):
    """A graph's input or output: its name, NumPy type name and axes, symbolic (str) or fixed (int)."""

    name: str
    data_type: Literal["float32", "int64", "bool"]
    axes: tuple[str | PositiveInt, ...]
    limit: PositiveInt | None = None
    """For ids, which count from 0: the first that is too large."""


class Graph(Record):
    """One ONNX file of a model."""

    file: FileName
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Cost(Record):
    """Floating-point operations; a multiply-add is two."""

    flops_per_query: NonNegativeInt
    flops_per_key: NonNegativeInt
    flops_per_pair: NonNegativeInt


class Manifest(Record):
    """All that is known of an artifact."""

    format_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    version: PositiveInt
    description: str
    config: dict[str, Any]
    """The attention configuration; empty for another module."""
    num_heads: NonNegativeInt
    """0 for a module that is no attention."""
    causal: bool
    opset: PositiveInt
    precision: Literal["fp32", "fp16", "bf16", "int8"]
    tolerance: Tolerance
    parameters: NonNegativeInt
    cost: Cost
    graphs: dict[GraphKind, Graph]
    tokenizer: FileName | None = None
    """For models that take text: the tokenizer, as the `tokenizers` library writes it."""
    weights: FileName | None = None
    """For models with large weights: the file that all graphs refer to."""
    golden: FileName
    parity_report: FileName
    files: dict[FileName, str]
    """SHA-256 of every file of the artifact but the manifest itself."""
    made_with: dict[str, str]
    """Versions of the libraries that made the artifact."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads the manifest of an artifact.

        Raises:
            ArtifactError: It is absent or does not parse.
        """
        path = folder / MANIFEST_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ArtifactError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise ArtifactError(f"{path}: {error}") from error

    def verify_files(self, folder: Path) -> None:
        """Compares every file with its hash.

        Raises:
            ArtifactError: A file is missing, not listed or differs.
        """
        graphs = [graph.file for graph in self.graphs.values()]
        for name in (*graphs, self.weights, self.tokenizer, self.golden, self.parity_report):
            if name is not None and name not in self.files:
                raise ArtifactError(f"{folder / MANIFEST_FILE}: lists no hash for {name}")
        for name, expected in self.files.items():
            found = file_hash(folder / name)
            if found != expected:
                raise ArtifactError(f"{folder / name}: SHA-256 is {found}, the manifest says {expected}")


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
        ArtifactError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from error


def is_whole(folder: Path) -> bool:
    """Whether an artifact is there and each of its files is as it was written."""
    try:
        Manifest.load(folder).verify_files(folder)
    except ArtifactError:
        return False
    return True
