"""Model archives of TorchServe (.mar), made by torch-model-archiver."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from attention_serving.artifact.certificate import CERTIFICATE_FILE
from attention_serving.artifact.golden import write_golden_arrays
from attention_serving.artifact.manifest import MANIFEST_FILE, GraphKind, Manifest
from attention_serving.export.errors import ExportError

ARCHIVER = "torch-model-archiver"
HANDLER = Path(__file__).with_name("torchserve_handler.py")
CONFIGURATION = Path(__file__).with_name("torchserve_config.yaml")


def find_archiver() -> Path:
    """The program torch-model-archiver: beside this Python interpreter, or on the PATH.

    Raises:
        ExportError: It is not installed.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (program := shutil.which(ARCHIVER, path=path)) is None:
        raise ExportError(
            f"{ARCHIVER} is not installed; it makes archives for TorchServe: pip install {ARCHIVER}"
        )
    return Path(program)


def write_archive(artifact: Path, manifest: Manifest, folder: Path) -> None:
    """Writes `<name>.mar`: one graph, its weights, golden vectors, manifest, certificate and the handler.

    Raises:
        ArtifactError: The artifact's golden vectors are damaged.
        ExportError: torch-model-archiver is missing or fails.
    """
    with tempfile.TemporaryDirectory() as temporary:
        staging = Path(temporary)
        graph = stage(artifact, manifest, staging)
        extra = sorted(path.name for path in staging.iterdir() if path.name != graph)
        arguments = ["--model-name", manifest.name, "--version", str(manifest.version)]
        arguments += ["--serialized-file", graph, "--extra-files", ",".join(extra)]
        arguments += ["--handler", str(HANDLER), "--config-file", str(CONFIGURATION)]
        arguments += ["--export-path", str(folder.resolve())]
        # The archiver removes files of the name of its temporary ones: they go into a folder of their own.
        scratch = staging / "temporary"
        scratch.mkdir()
        result = subprocess.run(  # noqa: S603 - the archiver that was found
            [find_archiver(), *arguments],
            cwd=staging,
            env={**os.environ, "TMPDIR": str(scratch)},
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise ExportError(f"{ARCHIVER} failed: {lines[-1] if lines else f'exit status {result.returncode}'}")


def stage(artifact: Path, manifest: Manifest, folder: Path) -> str:
    """Collects the model's own files of an archive in a folder.

    Returns:
        The file name of the graph.

    Raises:
        ArtifactError: The artifact's golden vectors are damaged.
    """
    graph = manifest.graphs[GraphKind.PLAIN].file
    write_golden_arrays(artifact, manifest, GraphKind.PLAIN, folder)
    # The certificate states the hashes of the files that are taken unchanged.
    certificate = CERTIFICATE_FILE if (artifact / CERTIFICATE_FILE).exists() else None
    for name in (graph, manifest.weights, MANIFEST_FILE, certificate):
        if name is not None:
            (folder / name).symlink_to((artifact / name).resolve())
    return graph
