"""Writes what a target needs beside an artifact, whole or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attention_serving.artifact.manifest import Manifest
from attention_serving.export.deployment import torchserve, triton
from attention_serving.export.deployment.target import DeploymentTarget
from attention_serving.export.errors import ArtifactExistsError


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
    with _replaced(folder) as temporary:
        if target is DeploymentTarget.TORCHSERVE:
            torchserve.write_archive(artifact, manifest, temporary)
        else:
            from attention_serving.export.deployment import onnx_file  # noqa: PLC0415 - imports onnx

            onnx_file.write_model(artifact, manifest, temporary)
    return sorted(folder.iterdir())


def _write_configurations(model: Path, manifest: Manifest, *, replace: bool) -> list[Path]:
    """Writes Triton's configurations into the folder of a model, which holds its versions."""
    texts = {model / name: text for name, text in triton.configurations(manifest).items()}
    for path, text in texts.items():
        if path.exists() and path.read_text() != text and not replace:
            raise ArtifactExistsError(
                f"{path} differs from the configuration of version {manifest.version}: it was edited, or "
                "written for another version; remove it, or replace it (replace=True)"
            )
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(text)
        temporary.replace(path)
    return list(texts)


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of another one if the block succeeds."""
    folder.parent.mkdir(exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        content = temporary / "content"
        content.mkdir()
        yield content
        if folder.exists():
            folder.rename(temporary / "previous")
        content.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # the folder holds this or other versions
            folder.parent.rmdir()
