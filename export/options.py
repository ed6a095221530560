"""The options of `python -m export`, and what they say is exported. Does not import PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from attention_serving.export.precision import ENCODER_TOLERANCES, TOLERANCES, Precision
from attention_serving.model.checkpoints.layouts import LAYOUTS
from attention_serving.model.config import POOLINGS

SOURCE, CHECKPOINT, RESULT, PRECISION = "What to export", "With --weights", "Destination", "Precision"
ENCODER = "With --encoder"
PRESET_SEED = 0
ROTARY_THETA = 10_000.0
HELP_VALUES = {
    "poolings": ", ".join(POOLINGS),
    "seed": PRESET_SEED,
    "layouts": ", ".join(sorted(LAYOUTS)),
    "rotary_layouts": ", ".join(sorted(name for name, layout in LAYOUTS.items() if layout.rotary)),
    "theta": ROTARY_THETA,
    "fp32": TOLERANCES[Precision.FP32],
    "encoders": ENCODER_TOLERANCES,
}


class Reference(StrEnum):
    """What the results of a text encoder are compared with."""

    SENTENCE_TRANSFORMERS = "sentence-transformers"
    """`SentenceTransformer(folder).encode(texts)`; the default of folders that it wrote."""
    TRANSFORMERS = "transformers"
    """The model and the tokenizer of the transformers library, then pooling; the default of other folders."""
    NONE = "none"
    """Nothing: the token ids alone are compared."""


def option(panel: str | None, *names: str, **settings: Any) -> Any:
    """An option in a group of the help. What the help says of it is in the docstring of its command."""
    return typer.Option(*names, rich_help_panel=panel, **{"show_default": False, **settings})


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is exported: one of the first five.

    Attributes:
        onnx: An ONNX file.
        module: A module of another project, `package.file:name`.
        preset: Name of a preset.
        weights: A checkpoint of another project.
        encoder: The folder of a text encoder.
        options: Arguments of `export_onnx`, of `load_module`, of `build_preset`, of `load_checkpoint`, or of
            `load_encoder` and `encoder_spec`.
    """

    onnx: Path | None = None
    module: str = ""
    preset: str = ""
    weights: Path | None = None
    encoder: Path | None = None
    options: Mapping[str, Any]
