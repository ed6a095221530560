"""The work of `python -m export`, once its options are checked. Imports PyTorch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from attention_serving.artifact.keys import read_private_key
from attention_serving.artifact.manifest import Manifest
from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import UNCHANGED, show, write_artifact
from attention_serving.export.deployment.write import DeploymentTarget, check_target, write_target
from attention_serving.export.encoder import classifier_spec, encoder_spec
from attention_serving.export.errors import ExportError
from attention_serving.export.options import Source
from attention_serving.export.precision import Precision
from attention_serving.export.signature import ExportSpec, attention_spec
from attention_serving.export.verify import console
from attention_serving.model.checkpoints.loading import load_checkpoint
from attention_serving.model.presets import PRESETS, build_preset
from attention_serving.model.text_encoder import TextEncoder
from attention_serving.model.text_folders import load as load_folder

EXAMPLE_LENGTH = 128


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
        show(step)

    progress("weights")
    spec, notes = load(source)
    if "cosine" in tolerances and spec.encoder is None:
        raise ValueError("--cosine needs a text encoder")
    # Differences replace the cosine of the precision.
    update = {"cosine": None, **tolerances} if tolerances else {}
    tolerance = spec.tolerances[precision].model_copy(update=update)
    folder, manifest = write_artifact(
        spec,
        model,
        out,
        precision=precision,
        tolerance=tolerance,
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


def describe(source: Source) -> None:
    """Prints the configuration of a module, its parameters and its floating-point operations.

    Raises:
        ValueError: The checkpoint cannot be read.
    """
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
    cases = len(report["cases"])
    error = f"{report['max_abs_error']:.2g} in {cases} cases" if cases else "not measured: no CPU kernels"
    if report["min_cosine"] is not None:
        error += f", smallest cosine of embeddings {report['min_cosine']:.6f}"
    if (texts := report["texts"]) is not None:
        error += (
            f"; {texts['count']} texts compared with {texts['reference']}, cosines from "
            f"{texts['min_cosine']:.6f}, {texts['mean_cosine']:.6f} on average"
        )
    console.print(
        f"{folder}{' (unchanged)' if unchanged else ''}",
        f"  {manifest.parameters:,} parameters; opset {manifest.opset}; graphs {', '.join(manifest.graphs)}",
        f"  largest difference from eager PyTorch {error}; tolerance {manifest.tolerance}",
        sep="\n",
    )
