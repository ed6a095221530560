"""The options of `python -m export`, by group. Does not import PyTorch."""

from pathlib import Path
from typing import Annotated

import typer

from attention_serving.export.deployment.target import DeploymentTarget
from attention_serving.export.precision import TOLERANCES, Precision
from attention_serving.model.checkpoints.layouts import LAYOUTS
from attention_serving.model.encoder.config import POOLINGS

SOURCE, CHECKPOINT, RESULT, TOLERANCE = "What to export", "With --weights", "Destination", "Precision"
ENCODER = "With --encoder"
PRESET_SEED = 0
ROTARY_THETA = 10_000.0
_FP32 = TOLERANCES[Precision.FP32]
_ROTARY = ", ".join(sorted(name for name, layout in LAYOUTS.items() if layout.rotary))

Preset = Annotated[
    str, typer.Argument(help="Name of the preset to export. --list shows all.", show_default=False)
]
ListPresets = Annotated[bool, typer.Option("--list", help="List the presets and exit.")]
Describe = Annotated[
    bool, typer.Option("--describe", help="Describe the module and exit. Nothing is written.")
]
ToolVersion = Annotated[
    bool,
    typer.Option(
        "--tool-version", "-V", help="Show the version of this program and exit. --version is the model's."
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        help="Checkpoint (.safetensors, .pt, .pth or .bin) to export instead of a preset.",
        rich_help_panel=SOURCE,
        show_default=False,
    ),
]
Encoder = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a text encoder to export instead of a preset: config.json, weights and "
        "tokenizer.json, with or without the modules.json of sentence-transformers. Nothing is downloaded.",
        rich_help_panel=SOURCE,
        show_default=False,
    ),
]
EncoderPooling = Annotated[
    str,
    typer.Option(
        "--pooling",
        help=f"How an embedding is made of the token vectors, for folders that do not state it: "
        f"{', '.join(POOLINGS)}. Default: that of the family.",
        rich_help_panel=ENCODER,
        show_default=False,
    ),
]
Dimensions = Annotated[
    list[int] | None,
    typer.Option(
        min=1,
        help="Number of leading elements that requests may shorten embeddings to, beside those that the "
        "folder states. Can be repeated.",
        rich_help_panel=ENCODER,
        show_default=False,
    ),
]
Truncate = Annotated[
    bool,
    typer.Option(
        "--truncate",
        help="Cut texts with more tokens than the model takes, unless a request says otherwise. Without it, "
        "they are refused unless a request asks for it.",
        rich_help_panel=ENCODER,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help=f"Seed of a preset's random weights. Default: {PRESET_SEED}.",
        rich_help_panel=SOURCE,
        show_default=False,
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        help=f"Layout of the checkpoint, required: {', '.join(sorted(LAYOUTS))}.",
        rich_help_panel=CHECKPOINT,
        show_default=False,
    ),
]
Prefix = Annotated[
    str,
    typer.Option(
        help="Prefix of the tensor names in the checkpoint, such as encoder.layer.0.attention.",
        rich_help_panel=CHECKPOINT,
        show_default=False,
    ),
]
Heads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of query heads, at least 1; required.",
        rich_help_panel=CHECKPOINT,
        show_default=False,
    ),
]
Causal = Annotated[
    bool, typer.Option("--causal", help="Rows do not attend to later rows.", rich_help_panel=CHECKPOINT)
]
Cross = Annotated[
    bool, typer.Option("--cross", help="Keys come from a second sequence.", rich_help_panel=CHECKPOINT)
]
RotaryTheta = Annotated[
    float | None,
    typer.Option(
        min=0,
        help=f"Base frequency of the rotary embedding, for layout {_ROTARY}; 0 for none. "
        f"Default: {ROTARY_THETA:g}.",
        rich_help_panel=CHECKPOINT,
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the model repository; created if it does not exist.",
        rich_help_panel=RESULT,
        show_default=False,
    ),
]
Name = Annotated[
    str,
    typer.Option(
        help="Name of the model. Default: the name of the preset.", rich_help_panel=RESULT, show_default=False
    ),
]
Version = Annotated[int, typer.Option(min=1, help="Version of the model.", rich_help_panel=RESULT)]
Replace = Annotated[
    bool,
    typer.Option(
        "--replace",
        help="Replace a different artifact of this name and version, and a different Triton configuration of "
        "this name. Without it, such an export is refused; an identical one succeeds and changes nothing.",
        rich_help_panel=RESULT,
    ),
]
SignKey = Annotated[
    Path | None,
    typer.Option(
        help="PEM file with an Ed25519 private key. Signs a certificate of what was proven on this machine.",
        rich_help_panel=RESULT,
        show_default=False,
    ),
]
Targets = Annotated[
    list[DeploymentTarget] | None,
    typer.Option(
        "--target",
        help="Also write what another server needs: triton, config.pbtxt beside the versions; torchserve, a "
        "model archive (needs torch-model-archiver); onnx, one ONNX file with its weights and a program that "
        "runs it. Can be repeated.",
        rich_help_panel=RESULT,
        show_default=False,
        show_choices=True,
    ),
]
ElementType = Annotated[
    Precision, typer.Option(help="Element type of the arithmetic.", rich_help_panel=TOLERANCE)
]
RelativeTolerance = Annotated[
    float | None,
    typer.Option(
        min=0,
        help=f"Largest accepted relative difference from eager PyTorch. Default for fp32: {_FP32.rtol:g}.",
        rich_help_panel=TOLERANCE,
        show_default=False,
    ),
]
AbsoluteTolerance = Annotated[
    float | None,
    typer.Option(
        min=0,
        help=f"Largest accepted absolute difference, added to the relative one. "
        f"Default for fp32: {_FP32.atol:g}.",
        rich_help_panel=TOLERANCE,
        show_default=False,
    ),
]
