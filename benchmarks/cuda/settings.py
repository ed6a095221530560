"""What all steps are told, and the names of what they run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from attention_serving.artifact.golden import GoldenCase, load_golden
from attention_serving.artifact.manifest import MANIFEST_FILE, Manifest
from attention_serving.export.precision import Precision
from attention_serving.model.presets import PRESETS
from attention_serving.server.engine.run.provider import Device, Provider

Row = dict[str, Any]
"""A row of the report."""
Value = TypeVar("Value")
PRECISIONS = (Precision.FP32, Precision.FP16, Precision.BF16)
# A causal module whose queries and keys differ in length. No preset has that.
CAUSAL_CROSS = "causal-cross-64x4"
TINY_ENCODER, SMALL_ENCODER, BASE_ENCODER = "tiny-encoder", "minilm-encoder", "base-encoder"
# In fp32 and fp16, their runs take little beside the call.
TINY = (
    "multi-head-64x4",
    "alibi-bidirectional-64x4",
    "sliding-window-bidirectional-64x4",
    "causal-self-attention",
    "cross-attention",
    TINY_ENCODER,
)
NOT_HERE = "not on this device"


@dataclass(frozen=True)
class Settings:
    """Where and on what a step runs.

    Attributes:
        cache: Folder of the artifacts, the fixed answers and the results.
        device: Where graphs run.
        quick: Whether sizes are small.
    """

    cache: Path
    device: Provider
    quick: bool

    def pick(self, full: Value, quick: Value) -> Value:
        """The value for the extent of the run."""
        return quick if self.quick else full

    @property
    def models(self) -> Path:
        """The model repository."""
        return self.cache / "models"

    @property
    def session_device(self) -> Device:
        """The device, with one thread for each run."""
        return Device(self.device, threads=1)

    @property
    def presets(self) -> list[tuple[str, Precision]]:
        """All attention modules; those whose precision ran least before come first."""
        names = self.pick((*PRESETS, CAUSAL_CROSS), ("multi-head-64x4", CAUSAL_CROSS))
        return [(name, precision) for precision in reversed(PRECISIONS) for name in names]

    @property
    def tiny(self) -> list[tuple[str, Precision]]:
        """The modules and the encoder with small graphs."""
        names = self.pick(TINY, ("multi-head-64x4", TINY_ENCODER))
        return [(name, precision) for name in names for precision in PRECISIONS[:2]]

    @property
    def encoders(self) -> list[tuple[str, Precision]]:
        """The text encoders that are compared or timed beside the tiny one."""
        small = [(SMALL_ENCODER, precision) for precision in PRECISIONS]
        return self.pick([*small, (BASE_ENCODER, Precision.FP16)], [])

    @property
    def wide(self) -> str:
        """The attention module that is timed."""
        return self.pick("multi-head-768x12", "multi-head-64x4")

    @property
    def missing(self) -> dict[tuple[str, Precision], bool]:
        """The artifacts that are not there, and whether each needs fixed answers."""
        wide = [(self.wide, precision) for precision in (Precision.FP32, Precision.FP16)]
        fixed = dict.fromkeys([*wide, *self.tiny, *self.encoders], True)
        cases = dict.fromkeys(self.presets, False) | fixed
        return {
            case: needs_answers
            for case, needs_answers in cases.items()
            if not (self.folder(*case) / MANIFEST_FILE).exists()
            or (needs_answers and not self.fixed_file(*case).exists())
        }

    def folder(self, name: str, precision: Precision) -> Path:
        """The folder of an artifact."""
        return self.models / f"{name}-{precision}" / "1"

    def fixed_file(self, name: str, precision: Precision) -> Path:
        """The file of fixed inputs and answers of an artifact."""
        return self.cache / "fixed" / f"{name}-{precision}.safetensors"

    def fixed_cases(self, name: str, precision: Precision) -> Iterator[tuple[Manifest, Path, GoldenCase]]:
        """Fixed cases: the manifest, the file of the graph, and inputs with their answers."""
        folder = self.folder(name, precision).resolve()
        manifest = Manifest.load(folder)
        for case in load_golden(self.fixed_file(name, precision)):
            yield manifest, folder / manifest.graphs[case.graph].file, case


def word(number: int) -> str:
    """A word of the encoders' vocabulary, which is one token."""
    return f"w{number}"
