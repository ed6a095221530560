"""The options of `python -m export`, and what they say is exported. Does not import PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_serving.export.deployment.write import DeploymentTarget
from attention_serving.export.precision import ENCODER_TOLERANCES, TOLERANCES, Precision
from attention_serving.model.checkpoints.layouts import LAYOUTS
from attention_serving.model.config import POOLINGS

SOURCE, CHECKPOINT, RESULT, TOLERANCE = "What to export", "With --weights", "Destination", "Precision"
ENCODER = "With --encoder"
PRESET_SEED = 0
ROTARY_THETA = 10_000.0
_FP32, _ENCODER = TOLERANCES[Precision.FP32], ENCODER_TOLERANCES[Precision.FP32]
_ROTARY = ", ".join(sorted(name for name, layout in LAYOUTS.items() if layout.rotary))


class Reference(StrEnum):
    """What the results of a text encoder are compared with."""

    SENTENCE_TRANSFORMERS = "sentence-transformers"
    """`SentenceTransformer(folder).encode(texts)`; the default of folders that it wrote."""
    TRANSFORMERS = "transformers"
    """The model and the tokenizer of the transformers library, then pooling; the default of other folders."""
    NONE = "none"
    """Nothing: the token ids alone are compared."""


def _option(panel: str | None, text: str, *names: str, **settings: Any) -> Any:
    """An option in a group of the help; defaults are part of its text."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **{"show_default": False, **settings})


Preset = Annotated[
    str,
    typer.Argument(
        help="Name of the preset to export (--list shows all), or a module of your project, such as "
        "my_project.model:build_ranker: a torch.nn.Module, or a function or class that returns one.",
        show_default=False,
    ),
]
Examples = Annotated[
    list[str] | None,
    _option(
        SOURCE,
        "With a module of your project: an input of forward by its name, shape and type, such as src=2,3,32, "
        "ids=2,3:int64<1000 (random ids below 1,000) or src_key_padding_mask=2,3:bool (a mask that hides "
        "nothing). Can be repeated.",
        "--example",
    ),
]
OnnxFile = Annotated[
    Path | None,
    _option(
        SOURCE,
        "ONNX file to export instead of a preset, with external data in its folder. Axis 0 of its inputs and "
        "outputs is the batch.",
        "--onnx",
    ),
]
Golden = Annotated[
    Path | None,
    _option(
        SOURCE,
        "With --onnx: file of numpy.savez with inputs and the outputs that the file's framework computes for "
        "them, by their names in the file. Default: the results are compared with ONNX's reference "
        "evaluator.",
        "--golden",
    ),
]
Masks = Annotated[
    list[str] | None,
    _option(
        SOURCE,
        "With a module of your project or --onnx: what a mask means, such as 'query_mask=True attends', "
        "'padding=True hides', 'bias=added' (-inf hides), 'n=lengths of sequence' (numbers of rows) or "
        "'attention_mask=None' (an ordinary input). Can be repeated.",
        "--mask",
    ),
]
ListPresets = Annotated[bool, _option(None, "List the presets and exit.", "--list")]
Describe = Annotated[
    bool,
    _option(
        None,
        "Describe the module and exit. Of a module of your project, show what would be exported, or what "
        "prevents it. Nothing is written.",
        "--describe",
        "--dry-run",
    ),
]
ToolVersion = Annotated[
    bool,
    _option(
        None, "Show the version of this program and exit. --version is the model's.", "--tool-version", "-V"
    ),
]
Weights = Annotated[
    Path | None,
    _option(SOURCE, "Checkpoint (.safetensors, .pt, .pth or .bin) to export instead of a preset."),
]
Encoder = Annotated[
    Path | None,
    _option(
        SOURCE,
        "Folder of a text encoder, text classifier or reranker to export instead of a preset, as saved by "
        "transformers or sentence-transformers, which is needed. Nothing is downloaded.",
    ),
]
EncoderPooling = Annotated[
    str,
    _option(
        ENCODER,
        f"How an embedding is made of the token vectors, for folders that do not state it: "
        f"{', '.join(POOLINGS)}. Default: the model's own for text towers, the last token for causal models, "
        "otherwise the mean.",
        "--pooling",
    ),
]
Dimensions = Annotated[
    list[int] | None,
    _option(
        ENCODER,
        "Number of leading elements that requests may shorten embeddings to, beside those that the folder "
        "states. Can be repeated.",
        min=1,
    ),
]
Truncate = Annotated[
    bool,
    _option(
        ENCODER,
        "Cut texts with more tokens than the model takes, unless a request says otherwise. Without it, they "
        "are refused unless a request asks for it.",
        "--truncate",
    ),
]
ComparedWith = Annotated[
    Reference | None,
    _option(
        ENCODER,
        "Library whose results for 64 texts the export must have: sentence-transformers, "
        "transformers or none. Default: the one that wrote the folder.",
        "--reference",
        show_choices=True,
    ),
]
TrustRemoteCode = Annotated[
    bool, _option(ENCODER, "Run Python code that the folder brings along.", "--trust-remote-code")
]
Seed = Annotated[
    int | None, _option(SOURCE, f"Seed of random weights and random examples. Default: {PRESET_SEED}.")
]
Layout = Annotated[
    str, _option(CHECKPOINT, f"Layout of the checkpoint, required: {', '.join(sorted(LAYOUTS))}.")
]
Prefix = Annotated[
    str,
    _option(CHECKPOINT, "Prefix of the tensor names in the checkpoint, such as encoder.layer.0.attention."),
]
Heads = Annotated[int | None, _option(CHECKPOINT, "Number of query heads, at least 1; required.", min=1)]
Causal = Annotated[bool, _option(CHECKPOINT, "Rows do not attend to later rows.", "--causal")]
Cross = Annotated[bool, _option(CHECKPOINT, "Keys come from a second sequence.", "--cross")]
RotaryTheta = Annotated[
    float | None,
    _option(
        CHECKPOINT,
        f"Base frequency of the rotary embedding, for layout {_ROTARY}; 0 for none. "
        f"Default: {ROTARY_THETA:g}.",
        min=0,
    ),
]
Out = Annotated[Path | None, _option(RESULT, "Folder of the model repository; created if it does not exist.")]
Name = Annotated[str, _option(RESULT, "Name of the model. Default: the name of the preset.")]
Aliases = Annotated[
    list[str] | None,
    _option(
        RESULT,
        "Further name under which requests reach the model, such as BAAI/bge-small-en-v1.5. Can be repeated.",
        "--alias",
    ),
]
Version = Annotated[int, _option(RESULT, "Version of the model.", min=1, show_default=True)]
Replace = Annotated[
    bool,
    _option(
        RESULT,
        "Replace a different artifact of this name and version, and a different Triton configuration of this "
        "name. Without it, such an export is refused; an identical one succeeds and changes nothing.",
        "--replace",
    ),
]
SignKey = Annotated[
    Path | None,
    _option(
        RESULT,
        "PEM file with an Ed25519 private key. Signs a certificate of what was proven on this machine.",
    ),
]
Targets = Annotated[
    list[DeploymentTarget] | None,
    _option(
        RESULT,
        "Also write what another server needs: triton, config.pbtxt beside the versions; torchserve, a model "
        "archive (needs torch-model-archiver); onnx, one ONNX file with its weights and a program that runs "
        "it. Can be repeated.",
        "--target",
        show_choices=True,
    ),
]
ElementType = Annotated[Precision, _option(TOLERANCE, "Element type of the arithmetic.", show_default=True)]
RelativeTolerance = Annotated[
    float | None,
    _option(
        TOLERANCE,
        f"Largest accepted relative difference from eager PyTorch. Default for fp32: {_FP32.rtol:g}; of text "
        f"encoders {_ENCODER.rtol:g}.",
        min=0,
    ),
]
AbsoluteTolerance = Annotated[
    float | None,
    _option(
        TOLERANCE,
        f"Largest accepted absolute difference, added to the relative one. Default for fp32: {_FP32.atol:g}; "
        f"of text encoders {_ENCODER.atol:g}.",
        min=0,
    ),
]


SmallestCosine = Annotated[
    float | None,
    _option(
        TOLERANCE,
        "Smallest accepted cosine between an embedding of a text encoder and eager PyTorch's, in place "
        f"of the differences. Default for int8: {ENCODER_TOLERANCES[Precision.INT8].cosine:g}.",
        "--cosine",
        min=0,
        max=0.999999,
    ),
]


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
