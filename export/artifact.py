"""Writes artifacts, whole or not at all: graphs over shared weights, golden vectors, reports, manifest."""

import dataclasses
import json
import platform
import re
import shutil
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import onnx
from safetensors.numpy import save_file

from artifact.golden import golden_tensors
from artifact.manifest import (
    MANIFEST_FILE,
    NAME_PATTERN,
    ArtifactError,
    Graph,
    GraphKind,
    Manifest,
    file_hash,
)
from artifact.tolerance import Tolerance
from export import parity
from export.graph import OPSET, ExportError, export_graph
from export.precision import HALF_TYPES, TOLERANCES, Precision, lowered, quantised
from export.signature import AttentionModule, Signature
from export.storage import WEIGHTS_FILE, write_graphs
from export.subject import Subject, attention_subject

GOLDEN_FILE = "golden.safetensors"
PARITY_FILE = "parity.json"
TOKENIZER_FILE = "tokenizer.json"
GRAPH_FILES = {
    GraphKind.PLAIN: "model.onnx",
    GraphKind.LENGTHS: "model.lengths.onnx",
    GraphKind.MASK: "model.mask.onnx",
    GraphKind.WEIGHTS: "model.weights.onnx",
}
LIBRARIES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")


class ArtifactExistsError(Exception):
    """A different artifact of that name and version is there already."""


@dataclasses.dataclass(frozen=True)
class Naming:
    """What an artifact is called."""

    name: str
    version: int
    description: str

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME_PATTERN, self.name):
            raise ValueError(f"name={self.name!r}: must match {NAME_PATTERN}")
        if self.version < 1:
            raise ValueError(f"version={self.version}: must be a positive integer")


def write_artifact(
    module: AttentionModule,
    naming: Naming,
    repository: Path,
    *,
    precision: Precision = Precision.FP32,
    tolerance: Tolerance | None = None,
    replace: bool = False,
) -> tuple[Path, Manifest]:
    """Exports an attention module, put into evaluation mode; as `publish`."""
    subject = attention_subject(module)
    return publish(subject, naming, repository, precision=precision, tolerance=tolerance, replace=replace)


def publish(
    subject: Subject,
    naming: Naming,
    repository: Path,
    *,
    precision: Precision = Precision.FP32,
    tolerance: Tolerance | None = None,
    replace: bool = False,
) -> tuple[Path, Manifest]:
    """Exports a module into `<repository>/<name>/<version>/`.

    Everything is written to a temporary folder beside it, compared with eager PyTorch, and renamed.
    The same module gives the same bytes; writing it a second time changes nothing.

    Args:
        subject: The module and what is to be said of it.
        naming: Name, version and description.
        repository: Made where it does not exist.
        precision: What the arithmetic is done in.
        tolerance: How far from eager PyTorch results may be, here and on every server; left out, that of
            the precision.
        replace: Whether to replace a different artifact of the same name and version.

    Returns:
        The artifact's folder and its manifest.

    Raises:
        ArtifactExistsError: A different artifact is there and `replace` is false.
        ExportError: The graph could not be made.
        ParityError: The graph differs from eager PyTorch by more than its tolerance.
    """
    target = repository / naming.name / str(naming.version)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{naming.version}.", dir=target.parent))
    try:
        manifest = _Draft(subject, naming, precision, tolerance or TOLERANCES[precision], temporary).write()
        _move(temporary, target, manifest, replace=replace)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # it holds other versions, or this one
            target.parent.rmdir()
    return target, manifest


@dataclasses.dataclass(frozen=True)
class _Draft:
    """An artifact on its way into a temporary folder."""

    subject: Subject
    naming: Naming
    precision: Precision
    tolerance: Tolerance
    folder: Path

    def write(self) -> Manifest:
        """Writes all files; the manifest last, which lists the others."""
        subject = self.subject
        write_graphs({GRAPH_FILES[s.kind]: self._graph(s) for s in subject.signatures}, self.folder)
        report = parity.as_json(parity.report(self._compare(), self.tolerance))
        (self.folder / PARITY_FILE).write_text(json.dumps(report, indent=2) + "\n")
        golden = [case for s in subject.signatures for case in parity.golden_cases(subject.module, s)]
        save_file(dict(golden_tensors(golden)), self.folder / GOLDEN_FILE)
        if subject.tokenizer is not None:
            subject.tokenizer.save(str(self.folder / TOKENIZER_FILE))
        manifest = self._manifest()
        (self.folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2) + "\n")
        return manifest

    def _graph(self, signature: Signature) -> onnx.ModelProto:
        graph = export_graph(lowered(self.subject.module, self.precision), signature)
        return quantised(graph) if self.precision is Precision.INT8 else graph

    def _compare(self) -> list[parity.ParityCase]:
        module, folder, tolerance = self.subject.module, self.folder, self.tolerance
        cases = [
            case
            for s in self.subject.signatures
            for case in parity.compare(module, s, str(folder / GRAPH_FILES[s.kind]), tolerance)
        ]
        if not cases and self.precision not in HALF_TYPES:
            raise ExportError(
                "ONNX Runtime has no CPU kernels for the graph, so that nothing could be proven"
            )
        return cases

    def _manifest(self) -> Manifest:
        subject, folder = self.subject, self.folder
        return Manifest(
            **dataclasses.asdict(self.naming),
            config=dict(subject.config),
            num_heads=subject.num_heads,
            causal=subject.causal,
            opset=OPSET,
            precision=self.precision.value,
            tolerance=self.tolerance,
            parameters=sum(parameter.numel() for parameter in subject.module.parameters()),
            cost=subject.cost,
            graphs={
                s.kind: Graph(file=GRAPH_FILES[s.kind], inputs=s.inputs, outputs=s.outputs)
                for s in subject.signatures
            },
            tokenizer=TOKENIZER_FILE if subject.tokenizer is not None else None,
            weights=WEIGHTS_FILE if (folder / WEIGHTS_FILE).exists() else None,
            golden=GOLDEN_FILE,
            parity_report=PARITY_FILE,
            files={path.name: file_hash(path) for path in sorted(folder.iterdir())},
            made_with={"python": platform.python_version()} | {name: version(name) for name in LIBRARIES},
        )


def _move(temporary: Path, target: Path, manifest: Manifest, *, replace: bool) -> None:
    # Servers run as other users than exporters; temporary folders and some writers deny them.
    temporary.chmod(0o755)
    for path in temporary.iterdir():
        path.chmod(0o644)
    if target.exists():
        if _same_model(target, manifest):
            return
        if not replace:
            raise ArtifactExistsError(
                f"{target} holds another artifact; choose another version, or replace it (--replace)"
            )
        retired = temporary.with_name(temporary.name + ".retired")
        target.rename(retired)
        try:
            temporary.rename(target)
        except OSError:
            retired.rename(target)
            raise
        shutil.rmtree(retired)
    else:
        temporary.rename(target)


def _same_model(folder: Path, manifest: Manifest) -> bool:
    """Whether the folder holds these very graphs, golden vectors and words; measured errors may differ."""
    try:
        found = Manifest.load(folder)
        found.verify_files(folder)
    except ArtifactError:
        return False
    return _identity(found) == _identity(manifest)


def _identity(manifest: Manifest) -> Manifest:
    files = {name: digest for name, digest in manifest.files.items() if name != manifest.parity_report}
    return manifest.model_copy(update={"files": files})
