"""Writes artifacts, whole or not at all: graphs over shared weights, golden vectors, reports, manifest."""

import dataclasses
import json
import logging
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import onnx
import onnx_ir
from safetensors.numpy import save_file

from attention_serving.artifact.golden import golden_tensors
from attention_serving.artifact.keys import PrivateKey
from attention_serving.artifact.manifest import (
    IN_BLOCKS,
    MANIFEST_FILE,
    Graph,
    GraphKind,
    Manifest,
    file_hash,
)
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export import parity
from attention_serving.export.block_mask import NotInBlocksError
from attention_serving.export.blocks import in_blocks
from attention_serving.export.certificate import sign_artifact
from attention_serving.export.errors import ExportError
from attention_serving.export.graph import OPSET, finish, trace
from attention_serving.export.lowering import HALF_TYPES, lowered
from attention_serving.export.model_id import ModelId
from attention_serving.export.precision import TOLERANCES, Precision
from attention_serving.export.quantisation import quantise_linear_layers
from attention_serving.export.signature import AttentionModule, Signature
from attention_serving.export.spec import ExportSpec, attention_spec, source_digest
from attention_serving.export.storage import WEIGHTS_FILE, write_graphs
from attention_serving.export.target import Target

log = logging.getLogger(__name__)

GOLDEN_FILE = "golden.safetensors"
PARITY_FILE = "parity.json"
TOKENIZER_FILE = "tokenizer.json"
GRAPH_FILES = {
    GraphKind.PLAIN: "model.onnx",
    GraphKind.LENGTHS: "model.lengths.onnx",
    GraphKind.MASK: "model.mask.onnx",
    GraphKind.WEIGHTS: "model.weights.onnx",
    GraphKind.TOKENS: "model.tokens.onnx",
    GraphKind.BLOCKS: "model.blocks.onnx",
    GraphKind.MASK_BLOCKS: "model.mask_blocks.onnx",
}
# By graph in blocks, the one that it is derived from.
WHOLE = {blocks: whole for whole, blocks in IN_BLOCKS.items()}
LIBRARIES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")
Progress = Callable[[str], object]
"""Is called with a short description of each step when it begins."""
UNCHANGED = "unchanged: the repository holds this very artifact"


def silent(_: str) -> None:
    """Shows no progress."""


def write_artifact(
    module: AttentionModule,
    model: ModelId,
    repository: Path,
    *,
    description: str = "",
    precision: Precision = Precision.FP32,
    tolerance: Tolerance | None = None,
    replace: bool = False,
    sign_key: PrivateKey | None = None,
    progress: Progress = silent,
) -> tuple[Path, Manifest]:
    """Exports an attention module into `<repository>/<name>/<version>/`.

    Everything is written to a temporary folder beside it, compared with eager PyTorch, and renamed. The same
    module gives the same bytes, so that a second export of it changes nothing and succeeds.

    Args:
        module: Put into evaluation mode.
        model: Name and version.
        repository: Model repository; made if it does not exist.
        description: One line for the manifest.
        precision: Element type of the arithmetic.
        tolerance: Largest accepted difference from eager PyTorch, here and on every server. Default: that of
            the precision.
        replace: Whether to replace a different artifact of the same name and version.
        sign_key: Signs a certificate of what was proven on this machine. Default: there is none.
        progress: Called with a description of each step.

    Returns:
        The artifact's folder and its manifest.

    Raises:
        ArtifactExistsError: The folder holds another artifact, and `replace` is false. An artifact that
            records another source is refused before the export begins.
        ExportError: The graph cannot be made.
        ParityError: The graph differs from eager PyTorch by more than its tolerance.
    """
    tolerance = tolerance or TOLERANCES[precision]
    spec = attention_spec(module)
    tokenizer = spec.tokenizer.to_str() if spec.tokenizer is not None else ""
    options = {"config": spec.config, "tokenizer": tokenizer, "description": description}
    source = source_digest(module, options | {"precision": precision, "tolerance": tolerance})
    target = Target(repository=repository, model=model, replace=replace)
    target.check(source)
    writer = ArtifactWriter(spec, model, description, precision, tolerance, source, progress)
    return publish(writer, target, sign_key)


def publish(
    writer: "ArtifactWriter", target: Target, sign_key: PrivateKey | None = None
) -> tuple[Path, Manifest]:
    """Writes an artifact to a temporary folder and moves it into place.

    Args:
        writer: Writes the files.
        target: Where they are moved to.
        sign_key: Signs a certificate of the artifact, also of one that is there already and is the same.

    Returns:
        The artifact's folder and its manifest.

    Raises:
        ArtifactExistsError: The target holds another artifact that is not to be replaced.
        ExportError: The graph cannot be made.
        ParityError: The graph differs from eager PyTorch by more than its tolerance.
    """
    with target.temporary_folder() as temporary:
        manifest = writer.write(temporary)
        if sign_key is not None:
            writer.progress("certificate")
            sign_artifact(temporary, sign_key)
        if not target.put(temporary, manifest):
            writer.progress(UNCHANGED)
            if sign_key is not None:
                sign_artifact(target.folder, sign_key)
    return target.folder, manifest


@dataclasses.dataclass(frozen=True)
class ArtifactWriter:
    """Writes the files of one artifact."""

    spec: ExportSpec
    model: ModelId
    description: str
    precision: Precision
    tolerance: Tolerance
    source: str
    progress: Progress = silent

    def write(self, folder: Path) -> Manifest:
        """Writes all files into a folder; the manifest, which lists the others, last."""
        spec, graphs = self.spec, self._graphs()
        signatures = [s for s in spec.signatures if s.kind in graphs]
        write_graphs({GRAPH_FILES[kind]: graph for kind, graph in graphs.items()}, folder)
        report = parity.as_json(parity.report(self._compare(folder, signatures), self.tolerance))
        (folder / PARITY_FILE).write_text(json.dumps(report, indent=2) + "\n")
        self.progress("golden vectors")
        golden = [case for s in signatures for case in parity.golden_cases(spec.module, s)]
        save_file(dict(golden_tensors(golden)), folder / GOLDEN_FILE)
        if spec.tokenizer is not None:
            spec.tokenizer.save(str(folder / TOKENIZER_FILE))
        manifest = self._manifest(folder, signatures)
        (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2) + "\n")
        return manifest

    def _graphs(self) -> dict[GraphKind, onnx.ModelProto]:
        """The graph of each signature, without those that cannot be computed in blocks."""
        module, traced = lowered(self.spec.module, self.precision), dict[GraphKind, onnx_ir.Model]()
        for signature in self.spec.signatures:
            kind = signature.kind
            self.progress(f"graph {kind}: export")
            if kind not in WHOLE:
                traced[kind] = trace(module, signature)
                continue
            try:
                traced[kind] = in_blocks(traced[WHOLE[kind]], causal=self.spec.causal)
            except NotInBlocksError as reason:
                log.warning(
                    "%s: graph %s is left out (%s): graph %s serves long sequences, in memory that grows "
                    "with the square of their length",
                    self.model.name,
                    kind,
                    reason,
                    WHOLE[kind],
                )
        if self.precision is Precision.INT8:
            for graph in traced.values():
                quantise_linear_layers(graph)
        return {s.kind: finish(traced[s.kind], s) for s in self.spec.signatures if s.kind in traced}

    def _compare(self, folder: Path, signatures: Sequence[Signature]) -> list[parity.ParityCase]:
        cases = []
        for signature in signatures:
            self.progress(f"graph {signature.kind}: comparison with eager PyTorch")
            path = str(folder / GRAPH_FILES[signature.kind])
            cases += parity.compare(self.spec.module, signature, path, self.tolerance)
        if not cases and self.precision not in HALF_TYPES:
            raise ExportError(
                "ONNX Runtime has no CPU kernels for an operator of the graph, so that it cannot be compared "
                "with eager PyTorch; replace the operator"
            )
        return cases

    def _manifest(self, folder: Path, signatures: Sequence[Signature]) -> Manifest:
        spec = self.spec
        return Manifest(
            name=self.model.name,
            version=self.model.version,
            description=self.description,
            config=dict(spec.config),
            num_heads=spec.num_heads,
            causal=spec.causal,
            opset=OPSET,
            precision=self.precision.value,
            activation_scales="row" if self.precision is Precision.INT8 else None,
            tolerance=self.tolerance,
            parameters=sum(parameter.numel() for parameter in spec.module.parameters()),
            cost=spec.cost,
            graphs={
                s.kind: Graph(file=GRAPH_FILES[s.kind], inputs=s.inputs, outputs=s.outputs)
                for s in signatures
            },
            max_lengths=dict(spec.max_lengths),
            encoder=spec.encoder,
            tokenizer=TOKENIZER_FILE if spec.tokenizer is not None else None,
            weights=WEIGHTS_FILE if (folder / WEIGHTS_FILE).exists() else None,
            golden=GOLDEN_FILE,
            parity_report=PARITY_FILE,
            files={path.name: file_hash(path) for path in sorted(folder.iterdir())},
            made_with={"python": platform.python_version()} | {name: version(name) for name in LIBRARIES},
            source=self.source,
        )
