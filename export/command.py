"""The work of `python -m export`, once its options are checked. Imports PyTorch."""

import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_serving.artifact.keys import read_private_key
from attention_serving.artifact.manifest import Manifest
from attention_serving.artifact.names import ModelId
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.api import check_module, export_module, export_onnx
from attention_serving.export.artifact import UNCHANGED, show, write_artifact
from attention_serving.export.deployment.write import DeploymentTarget, check_target, write_target
from attention_serving.export.encoder import classifier_spec, encoder_spec
from attention_serving.export.errors import ExportError
from attention_serving.export.options import PRESET_SEED, Source
from attention_serving.export.parity import NEAREST
from attention_serving.export.precision import TOLERANCES, Precision
from attention_serving.export.signature import ExportSpec, attention_spec
from attention_serving.export.verify import console
from attention_serving.model.checkpoints.loading import load_checkpoint
from attention_serving.model.presets import PRESETS, build_preset
from attention_serving.model.text_encoder import TextEncoder
from attention_serving.model.text_folders import load as load_folder

EXAMPLE_LENGTH = 128
# NAME=SHAPE, and perhaps :TYPE and <BOUND.
EXAMPLE = re.compile(r"(?P<name>\w+)=(?P<shape>\d+(,\d+)*)(:(?P<type>float32|int64|bool))?(<(?P<bound>\d+))?")


def load_module(
    reference: str, examples: Sequence[str], masks: Sequence[str] = (), seed: int = PRESET_SEED
) -> tuple[nn.Module, dict[str, Any]]:
    """A module of the project in the working directory, and further arguments of `export_module`.

    Args:
        reference: `package.file:name` of a module, or of a function or class that returns one.
        examples: By input, `name=shape`, and perhaps `:type` and `<bound`.
        masks: By input, `name=meaning`.
        seed: That of random weights and examples.

    Raises:
        ValueError: There is no such module, or an example is not of this form.
    """
    file, _, name = reference.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    torch.manual_seed(seed)
    try:
        value = importlib.import_module(file)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{reference} cannot be imported from {Path.cwd()}: {error}") from error
    module = value if isinstance(value, nn.Module) else value() if callable(value) else value
    if not isinstance(module, nn.Module):
        raise ValueError(  # noqa: TRY004 - as for all other arguments
            f"{reference} is {type(module).__name__}; name a torch.nn.Module, or a function that returns one"
        )
    return module, {"example_inputs": dict(map(_example, examples)), "masks": _meanings(masks)}


def _meanings(masks: Sequence[str]) -> dict[str, str | None]:
    pairs = (mask.partition("=") for mask in masks)
    return {name: None if meaning == "None" else meaning for name, _, meaning in pairs}


def _example(text: str) -> tuple[str, Tensor]:
    if (match := EXAMPLE.fullmatch(text)) is None:
        raise ValueError(f"--example {text}: must be such as src=2,3,32 or ids=2,3:int64<1000")
    name, data_type, bound = match["name"], match["type"], match["bound"]
    shape = [int(size) for size in match["shape"].split(",")]
    if data_type == "bool":
        return name, torch.full(shape, "padding" not in name)
    if data_type == "int64" or bound:
        return name, torch.randint(int(bound), shape) if bound else torch.ones(shape, dtype=torch.int64)
    return name, torch.randn(shape)


def load(source: Source) -> tuple[ExportSpec, Sequence[str]]:
    """Builds a preset, or reads a checkpoint or the folder of an encoder.

    Returns:
        The export, and what its reader notes: parts of the file that are left out, warnings of libraries.

    Raises:
        CheckpointError: The file cannot be read, or does not hold the layout under the prefix.
    """
    options = dict(source.options)
    if source.encoder is not None:
        reading = {name: options.pop(name) for name in ("pooling", "trust_remote_code") if name in options}
        text_module = load_folder(source.encoder, **reading)
        if isinstance(text_module, TextEncoder):
            return encoder_spec(text_module, **options), text_module.notes
        if "dimensions" in options:
            raise ValueError("--dimensions: the folder is a classifier, which has no embeddings")
        return classifier_spec(text_module, **options), text_module.notes
    if source.weights is not None:
        checkpoint = load_checkpoint(source.weights, **options)
        prefix = options.get("prefix", "no prefix")
        description = f"{options['layout']} checkpoint {source.weights.name}, {prefix}"
        notes = [f"skipped (not part of attention): {name}" for name in checkpoint.skipped]
        return attention_spec(checkpoint.module, description), notes
    module = build_preset(source.preset, **options)
    return attention_spec(module, PRESETS[source.preset].description), ()


def run(
    source: Source,
    model: ModelId,
    out: Path,
    precision: Precision,
    *,
    tolerances: Mapping[str, float],
    replace: bool,
    sign_key: Path | None,
    targets: Sequence[DeploymentTarget],
) -> None:
    """Exports a module, writes what other servers need beside it, and prints what was written.

    `tolerances` has values of `rtol`, `atol` and `cosine` in place of those of the precision.

    Raises:
        ArtifactExistsError: The repository holds another artifact of that name and version, or another
            configuration of Triton.
        ExportError: The export failed, or a program that a target needs is missing.
        ValueError: The checkpoint cannot be read.
        KeyFileError: `sign_key` is not the file of an Ed25519 private key.
    """
    key = read_private_key(sign_key) if sign_key is not None else None
    for target in targets:
        check_target(target)
        if source.encoder is not None and target is DeploymentTarget.TORCHSERVE:
            raise ExportError("--target torchserve does not support --encoder; choose triton or onnx")
    steps = list[str]()

    def progress(step: str) -> None:
        steps.append(step)
        if source.module or source.onnx:
            sys.stderr.write(f"{step}\n")
        else:
            show(step)

    if source.module or source.onnx:
        notes: Sequence[str] = ()
        usual = TOLERANCES[precision].model_dump()
        folder, manifest = _export(
            source,
            out=out,
            name=model.name,
            version=model.version,
            aliases=model.aliases,
            precision=precision,
            tolerance=Tolerance(**{**usual, **tolerances}) if tolerances else None,
            replace=replace,
            sign_key=sign_key,
            progress=progress,
        )
    else:
        progress("weights")
        spec, notes = load(source)
        folder, manifest = write_artifact(
            spec,
            model,
            out,
            precision=precision,
            tolerance=_tolerance(spec, precision, tolerances),
            replace=replace,
            sign_key=key,
            progress=progress,
        )
    for note in notes:
        console.print(note)
    _print_artifact(folder, manifest, unchanged=steps[-1] == UNCHANGED)
    if key is not None:
        console.print(f"  signed with key {key.public_key.keyid}")
    for target in targets:
        for path in write_target(folder, target, replace=replace):
            console.print(f"  {target}: {path}")


def _export(source: Source, *, precision: Precision, **arguments: Any) -> tuple[Path, Manifest]:
    if source.onnx is not None:
        golden, masks = source.options.get("golden"), _meanings(source.options.get("masks", ()))
        return export_onnx(source.onnx, golden=golden, masks=masks, **arguments)
    module, inputs = load_module(source.module, **source.options)
    return export_module(module, precision=precision, **inputs, **arguments)


def _tolerance(spec: ExportSpec, precision: Precision, tolerances: Mapping[str, float]) -> Tolerance:
    if "cosine" in tolerances and spec.encoder is None:
        raise ValueError("--cosine needs a text encoder")
    # Differences replace the cosine of the precision.
    return spec.tolerances[precision].model_copy(update={"cosine": None, **tolerances} if tolerances else {})


def describe(source: Source) -> None:
    """Prints the configuration of a module, its parameters and its floating-point operations.

    Of a module of another project, prints what would be exported.

    Raises:
        ValueError: The checkpoint cannot be read, or the module cannot be exported.
    """
    if source.module:
        module, arguments = load_module(source.module, **source.options)
        check_module(module, **arguments, progress=console.print)
        return
    (spec, notes), length = load(source), EXAMPLE_LENGTH
    cost = spec.cost
    linear = length * (cost.flops_per_query + cost.flops_per_key)
    products = length * length * cost.flops_per_pair
    parameters = sum(parameter.numel() for parameter in spec.module.parameters())
    console.print(
        *notes,
        spec.description,
        f"  {spec.encoder or spec.classifier or spec.module.config}",
        f"  {parameters:,} parameters",
        f"  floating-point operations: {cost.flops_per_query:,} for each query row, "
        f"{cost.flops_per_key:,} for each key row, {cost.flops_per_pair:,} for each pair of them",
        f"  for {length} rows: {linear:,} in the linear layers, {products:,} in the attention products",
        sep="\n",
    )


def _print_artifact(folder: Path, manifest: Manifest, *, unchanged: bool) -> None:
    report = json.loads((folder / manifest.parity_report).read_bytes())
    cases = sum(case["judge"] is None for case in report["cases"])
    error = f"{report['max_abs_error']:.2g} in {cases} cases" if cases else "not measured: no CPU kernels"
    if report["min_cosine"] is not None:
        error += f", smallest cosine of embeddings {report['min_cosine']:.6f}"
    if (texts := report["texts"]) is not None:
        error += (
            f"; {texts['count']} texts compared with {texts['reference']}, cosines from "
            f"{texts['min_cosine']:.6f}, {texts['mean_cosine']:.6f} on average"
        )
    if "nearest" in report:
        counts = ", ".join(f"{count:.2f} as {name}" for name, count in report["nearest"].items())
        error += f"; of the {NEAREST} nearest texts stay {counts}"
    console.print(
        f"{folder}{' (unchanged)' if unchanged else ''}",
        f"  {manifest.parameters:,} parameters; opset {manifest.opset}; graphs {', '.join(manifest.graphs)}",
        f"  largest difference from {manifest.judge} {error}; tolerance {manifest.tolerance}",
        sep="\n",
    )
