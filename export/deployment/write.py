"""The servers and runtimes that an artifact can be deployed to, and what each needs beside it.

Files are written whole or not at all. Does not import onnx, which takes a second.
"""

import shutil
from enum import StrEnum
from pathlib import Path

from attention_serving.artifact.golden import write_golden_arrays
from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.export.deployment import torchserve, triton
from attention_serving.export.errors import ArtifactExistsError
from attention_serving.export.target import put_folder, temporary_folder

MODEL_FILE = "model.onnx"
RUN_FILE = "run.py"
SAMPLE = Path(__file__).with_name("sample_run.py")
# Protobuf messages are smaller than 2 GiB; the rest is for the graph itself.
MAX_WEIGHTS_BYTES = (1 << 31) - (64 << 20)


class DeploymentTarget(StrEnum):
    """Another server or runtime."""

    TRITON = "triton"
    """NVIDIA Triton: `<repository>/<name>/config.pbtxt`, beside the versions of the model."""
    TORCHSERVE = "torchserve"
    """TorchServe: `<repository>/<name>/torchserve/<version>/<name>.mar`."""
    ONNX = "onnx"
    """Any ONNX Runtime: `model.onnx`, `run.py` and `golden.npz` in `<repository>/<name>/onnx/<version>/`."""


def check_target(target: DeploymentTarget | str) -> None:
    """Checks before an export that the programs which a target needs are installed.

    Raises:
        ExportError: A program is missing.
        ValueError: The target does not exist.
    """
    if DeploymentTarget(target) is DeploymentTarget.TORCHSERVE:
        torchserve.find_archiver()


def write_target(artifact: Path, target: DeploymentTarget | str, *, replace: bool = False) -> list[Path]:
    """Writes what a target needs, from an artifact alone.

    The files of TorchServe and ONNX are derived from one version of the model, and are always written anew.
    Triton's configuration holds for all versions and may have been edited: a different one is kept.

    Args:
        artifact: The artifact's folder, `<repository>/<name>/<version>`. It is not changed.
        target: Where the model is to run.
        replace: Whether to replace a different Triton configuration.

    Returns:
        The written files.

    Raises:
        ArtifactError: The artifact is damaged.
        ArtifactExistsError: There is a different configuration, and `replace` is false.
        ExportError: A program that the target needs is missing or fails.
        ValueError: The target does not exist.
    """
    target, manifest = DeploymentTarget(target), Manifest.load(artifact)
    manifest.verify_files(artifact)
    if target is DeploymentTarget.TRITON:
        return _write_configurations(artifact.parent, manifest, replace=replace)
    folder = artifact.parent / target.value / artifact.name
    with temporary_folder(folder) as temporary:
        write = torchserve.write_archive if target is DeploymentTarget.TORCHSERVE else write_model
        write(artifact, manifest, temporary)
        put_folder(temporary, folder)
    return sorted(folder.iterdir())


def write_model(artifact: Path, manifest: Manifest, folder: Path) -> None:
    """Writes the plain graph of a model, `run.py` and the golden vectors that it replays.

    The graph states its origin and tolerance in its metadata. Weights of more than MAX_WEIGHTS_BYTES stay in
    a file beside the graph.

    Raises:
        ArtifactError: The artifact's golden vectors are damaged.
    """
    import onnx  # noqa: PLC0415

    path = folder / MODEL_FILE
    shutil.copyfile(artifact / manifest.graphs[GraphKind.PLAIN].file, path)
    weights = None if manifest.weights is None else folder / manifest.weights
    if weights is not None:  # a copy, because onnx refuses files that have several hard links
        shutil.copyfile(artifact / weights.name, weights)
    inside = weights is None or weights.stat().st_size <= MAX_WEIGHTS_BYTES
    model = onnx.load(path, load_external_data=inside)
    names = ("name", "version", "description", "precision", "source")
    properties = {name: str(getattr(manifest, name)) for name in names}
    properties |= {name: str(getattr(manifest.tolerance, name)) for name in ("rtol", "atol")}
    onnx.helper.set_model_props(model, properties)
    path.write_bytes(model.SerializeToString(deterministic=True))
    if weights is not None and inside:
        weights.unlink()
    onnx.checker.check_model(path)
    shutil.copyfile(SAMPLE, folder / RUN_FILE)
    write_golden_arrays(artifact, manifest, GraphKind.PLAIN, folder)


def _write_configurations(model: Path, manifest: Manifest, *, replace: bool) -> list[Path]:
    """Writes Triton's configurations into the folder of a model, which holds its versions."""
    texts = {model / name: text for name, text in triton.configurations(manifest).items()}
    for path, text in texts.items():
        if path.exists() and path.read_text() != text and not replace:
            raise ArtifactExistsError(
                f"{path} differs from the configuration of version {manifest.version}: it was edited, or "
                "written for another version; remove it, or replace it (--replace, replace=True)"
            )
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(text)
        temporary.replace(path)
    return list(texts)
