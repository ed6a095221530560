"""Writes artifacts, whole or not at all: graphs over shared weights, golden vectors, reports, manifest."""

import hashlib
import json
import logging
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import onnx
import onnx_ir
import torch
from onnx.external_data_helper import set_external_data
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernelError
from safetensors.numpy import save_file
from torch import Tensor, nn

from attention_serving.artifact.golden import QUERY_TEXT, GoldenCase, golden_tensors, texts_of, token_inputs
from attention_serving.artifact.kernels import AttentionOperator
from attention_serving.artifact.keys import PrivateKey
from attention_serving.artifact.manifest import (
    EAGER,
    IN_BLOCKS,
    JUDGE,
    MANIFEST_FILE,
    OF_RERANKERS,
    Graph,
    GraphKind,
    Manifest,
    file_hash,
)
from attention_serving.artifact.names import ModelId
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export import parity
from attention_serving.export.assumptions import Assumption
from attention_serving.export.blocks import NotInBlocksError, split_into_blocks
from attention_serving.export.certificate import sign_artifact
from attention_serving.export.cuda import cuda_facts, opset_of
from attention_serving.export.errors import ExportError, details_in_file
from attention_serving.export.graph import finish_graph, trace
from attention_serving.export.precision import Precision
from attention_serving.export.probe import LongCase
from attention_serving.export.quantisation import HALF_TYPES, in_precision, quantise_linear_layers
from attention_serving.export.rewrite import attention_operators
from attention_serving.export.signature import (
    QUERY_AXIS,
    AttentionModule,
    ExportSpec,
    Signature,
    attention_spec,
)
from attention_serving.export.target import Target, temporary_folder

log = logging.getLogger(__name__)

GOLDEN_FILE = "golden.safetensors"
PARITY_FILE = "parity.json"
TOKENIZER_FILE = "tokenizer.json"
GRAPH_FILES = {kind: f"model.{kind}.onnx" for kind in GraphKind} | {GraphKind.PLAIN: "model.onnx"}
WEIGHTS_FILE = "weights.bin"
# Weights of at least this size in total are stored in one file that the graphs share.
EXTERNAL_BYTES = 1 << 20
# Smaller tensors stay in the graph: shapes and scalars, which the runtime folds.
EXTERNAL_TENSOR_BYTES = 1 << 10
# Page size, because the file is mapped into memory.
ALIGNMENT = 4096
# By graph in blocks, the one that it is derived from.
GRAPH_WITHOUT_BLOCKS = {blocks: graph for graph, blocks in IN_BLOCKS.items()}
# Texts of the reference that servers replay.
GOLDEN_TEXTS = 24
LIBRARIES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")
Progress = Callable[[str], object]
"""Is called with a short description of each step when it begins."""
# What computes the cases that the judge of an ONNX file does not reach.
RUNS_OF_FILE = "the file in ONNX Runtime"
UNCHANGED = "unchanged: the repository holds this very artifact"


def show(step: str) -> None:
    """Prints a step on standard error if that is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{step}\n")


@details_in_file()
def write_artifact(
    what: AttentionModule | ExportSpec,
    model: ModelId,
    repository: Path,
    *,
    description: str = "",
    precision: Precision = Precision.FP32,
    tolerance: Tolerance | None = None,
    replace: bool = False,
    sign_key: PrivateKey | None = None,
    progress: Progress = show,
) -> tuple[Path, Manifest]:
    """Exports a module into `<repository>/<name>/<version>/`.

    Everything is written to a temporary folder beside it, compared with eager PyTorch, and renamed. The same
    module gives the same bytes, so that a second export of it changes nothing and succeeds.

    Args:
        what: An attention module, which is put into evaluation mode; or what is exported of another module,
            such as an `encoder_spec`.
        model: Name and version.
        repository: Model repository; made if it does not exist.
        description: One line for the manifest, for an attention module.
        precision: Element type of the arithmetic.
        tolerance: Largest accepted difference from eager PyTorch, here and on every server. Default: that of
            the precision.
        replace: Whether to replace a different artifact of the same name and version.
        sign_key: Signs a certificate of what was proven on this machine. Default: there is none.
        progress: Called with a description of each step. Default: shown on standard error if that is a
            terminal.

    Returns:
        The artifact's folder and its manifest.

    Raises:
        ArtifactExistsError: The folder holds another artifact, and `replace` is false. An artifact that
            records another source is refused before the export begins.
        ExportError: The graph cannot be made.
        ParityError: The graph differs from eager PyTorch by more than its tolerance.
    """
    spec = what if isinstance(what, ExportSpec) else attention_spec(what, description)
    tolerance = tolerance or spec.tolerances[precision]
    identity = {**spec.identity, "description": spec.description}
    source = source_digest(spec.module, {**identity, "precision": precision, "tolerance": tolerance})
    target = Target(repository=repository, model=model, replace=replace)
    target.check(source)
    return ArtifactWriter(spec, target, precision, tolerance, source, progress).publish(sign_key)


def source_digest(module: nn.Module, options: Mapping[str, object]) -> str:
    """SHA-256 of a module's class, its weights and the options of its export.

    It is cheap beside an export, and tells two sources apart before either is exported. Equal digests do not
    prove equal artifacts, because the code of a module is not part of the digest.
    """
    digest = hashlib.sha256(type(module).__qualname__.encode())
    digest.update(json.dumps(dict(options), sort_keys=True, default=str).encode())
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} ".encode())
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class ArtifactWriter:
    """Writes one artifact.

    Attributes:
        source: The `source_digest` of what is exported, which the target was checked for.
    """

    spec: ExportSpec
    target: Target
    precision: Precision
    tolerance: Tolerance
    source: str
    progress: Progress = show

    def publish(self, sign_key: PrivateKey | None) -> tuple[Path, Manifest]:
        """Writes the artifact to a temporary folder and moves it into place.

        Args:
            sign_key: Signs a certificate of it, also of an artifact that is there already and is the same.
        """
        with temporary_folder(self.target.folder) as temporary:
            manifest = self._write(temporary)
            if sign_key is not None:
                self.progress("certificate")
                sign_artifact(temporary, sign_key)
            if not self.target.put(temporary, manifest):
                self.progress(UNCHANGED)
                if sign_key is not None:
                    sign_artifact(self.target.folder, sign_key)
        return self.target.folder, manifest

    def _write(self, folder: Path) -> Manifest:
        """Writes all files into a folder; the manifest, which lists the others, last."""
        spec, (graphs, assumptions, attention) = self.spec, self._graphs()
        judge = spec.file.judge if spec.file is not None else ""
        signatures = [s for s in spec.signatures if s.kind in graphs]
        write_graphs({GRAPH_FILES[kind]: graph for kind, graph in graphs.items()}, folder)
        largest, refuses_nan = dict(signatures[0].max_lengths), False
        cases = list[parity.ParityCase]()
        for signature in signatures:
            if (runner := self._runner(folder, signature)) is None:
                continue
            self._limit(largest, runner, signature, assumptions.get(signature.kind, ()))
            self.progress(f"graph {signature.kind}: comparison with {judge or EAGER}")
            if spec.file is not None:
                cases += runner.compare(spec.file.golden[signature.kind])
                in_grid = runner.cases({}, self._reached(signature), special_values=False)
                cases += [replace(case, judge=RUNS_OF_FILE) for case in in_grid]
            elif signature.kind is GraphKind.PLAIN:
                cases += self._compare_plain(runner, replace(signature, max_lengths=largest))
                refuses_nan = spec.compares_special_values and runner.loses_nan()
            else:
                cases += runner.cases(self._texts(signature), self._reached(signature), special_values=False)
        if not cases and self.precision not in HALF_TYPES:
            raise ExportError(
                "ONNX Runtime has no CPU kernels for an operator of the graph, so that it cannot be compared "
                "with eager PyTorch; replace the operator"
            )
        signatures = [replace(signature, max_lengths=largest) for signature in signatures]
        for note in spec.notes:
            log.warning("%s: %s", self.target.model.name, note)
        report = parity.report(
            cases,
            self.tolerance,
            spec.reference,
            judge=judge,
            branches=spec.branches,
            notes=spec.notes,
        )
        if spec.encoder is not None and spec.encoder.embedding_width and spec.texts:
            report["nearest"] = parity.nearest_overlaps(spec.texts, spec.encoder)
        report["cuda"] = cuda_facts(graphs, attention)
        (folder / PARITY_FILE).write_text(json.dumps(report, indent=2) + "\n")
        self.progress("golden vectors")
        golden = [
            case
            for s in signatures
            for case in (spec.file.golden[s.kind] if spec.file else parity.golden_cases(spec.module, s))
        ]
        golden += spec.texts[:GOLDEN_TEXTS]
        golden += [case for _, case in spec.long_cases if case.graph in OF_RERANKERS and case.graph in graphs]
        save_file(dict(golden_tensors(golden)), folder / GOLDEN_FILE)
        if spec.tokenizer is not None:
            spec.tokenizer.save(str(folder / TOKENIZER_FILE))
        manifest = self._manifest(
            folder, signatures, attention, opset=max(map(opset_of, graphs.values())), refuses_nan=refuses_nan
        )
        (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2) + "\n")
        return manifest

    def _graphs(
        self,
    ) -> tuple[
        dict[GraphKind, onnx.ModelProto],
        dict[GraphKind, Sequence[Assumption]],
        dict[GraphKind, tuple[AttentionOperator, ...]],
    ]:
        """Each graph, without those that cannot be computed in blocks; what each assumes; its operators."""
        spec, traced = self.spec, dict[GraphKind, onnx_ir.Model]()
        if spec.file is not None:
            return dict(spec.file.graphs), {}, {}
        assumptions = dict[GraphKind, Sequence[Assumption]]()
        for signature in spec.signatures:
            kind = signature.kind
            if kind in OF_RERANKERS and self.precision is Precision.INT8:
                # The keys and values of all layers would have to be as exact as scores are.
                continue
            self.progress(f"graph {kind}: export")
            if kind not in GRAPH_WITHOUT_BLOCKS:
                module = in_precision(signature.part_of(spec.module), self.precision)
                traced[kind], assumptions[kind] = trace(module, signature)
                continue
            try:
                traced[kind] = split_into_blocks(traced[GRAPH_WITHOUT_BLOCKS[kind]], causal=spec.causal)
            except NotInBlocksError as reason:
                log.warning(
                    "%s: graph %s is left out (%s): graph %s serves long sequences, in memory that grows "
                    "with the square of their length",
                    self.target.model.name,
                    kind,
                    reason,
                    GRAPH_WITHOUT_BLOCKS[kind],
                )
        if self.precision is Precision.INT8:
            for graph in traced.values():
                quantise_linear_layers(graph)
        graphs = {s.kind: finish_graph(traced[s.kind], s) for s in spec.signatures if s.kind in traced}
        return graphs, assumptions, {kind: attention_operators(graph) for kind, graph in traced.items()}

    def _limit(
        self,
        largest: dict[str, int],
        runner: parity.GraphRunner,
        signature: Signature,
        assumptions: Sequence[Assumption],
    ) -> None:
        """Lowers the largest lengths to those that follow from what the trace of a graph assumes."""
        doubtful = [assumption for assumption in assumptions if assumption.matters(signature)]
        for axis, (length, place) in runner.limits(doubtful).items():
            if length < largest.get(axis, length + 1):
                self.progress(f"largest length of {axis}: {length}, because of {place}")
                largest[axis] = length

    def _runner(self, folder: Path, signature: Signature) -> parity.GraphRunner | None:
        """Runs a graph; None if ONNX Runtime has no CPU kernels for its operators."""
        path = folder / GRAPH_FILES[signature.kind]
        try:
            return parity.GraphRunner(self.spec.module, signature, path, self.tolerance)
        except NoKernelError:
            return None

    def _compare_plain(self, runner: parity.GraphRunner, signature: Signature) -> Iterable[parity.ParityCase]:
        is_strict = self.precision is Precision.FP32 and not self.spec.branches
        special_values = self.spec.compares_special_values and is_strict
        return runner.cases(self._texts(signature), self._reached(signature), special_values=special_values)

    def _reached(self, signature: Signature) -> Sequence[LongCase]:
        """Long cases that a graph takes."""
        return [
            (sizes, case)
            for sizes, case in self.spec.long_cases
            if case.graph is signature.kind
            and all(size <= signature.max_lengths.get(axis, size) for axis, size in sizes.items())
        ]

    def _made_with(self) -> dict[str, str]:
        versions = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
        further = {"reference": self.spec.reference, JUDGE: self.spec.file.judge if self.spec.file else ""}
        return versions | {name: text for name, text in further.items() if text}

    def _texts(self, signature: Signature) -> dict[str, GoldenCase]:
        """By text, the case that its tokens make of a case of the reference."""
        if self.spec.tokenizer is None:
            return {}
        names, most = [spec.name for spec in signature.inputs], signature.max_lengths.get(QUERY_AXIS)
        encode = token_inputs(self.spec.tokenizer, names, most, self.spec.encoder or self.spec.classifier)
        cases = dict[str, GoldenCase]()
        for case in self.spec.texts:
            texts, is_query = texts_of(case), QUERY_TEXT in case.inputs
            if case.graph is signature.kind:
                name = " | ".join(texts) + " (query)" * is_query
                cases[name] = GoldenCase(case.graph, encode(*texts, is_query=is_query), case.outputs)
        return cases

    def _manifest(
        self,
        folder: Path,
        signatures: Sequence[Signature],
        attention: Mapping[GraphKind, tuple[AttentionOperator, ...]],
        *,
        opset: int,
        refuses_nan: bool,
    ) -> Manifest:
        spec, file = self.spec, self.spec.file
        scales: Literal["row", "fixed"] | None = "row" if self.precision is Precision.INT8 else None
        parameters = sum(parameter.numel() for parameter in spec.module.parameters())
        return Manifest(
            name=self.target.model.name,
            version=self.target.model.version,
            aliases=self.target.model.aliases,
            description=spec.description,
            config=dict(spec.config),
            num_heads=spec.num_heads,
            causal=spec.causal,
            opset=opset,
            precision=self.precision.value,
            activation_scales=scales if file is None else file.activation_scales,
            tolerance=self.tolerance,
            parameters=parameters if file is None else file.parameters,
            cost=spec.cost,
            graphs={
                s.kind: Graph(
                    file=GRAPH_FILES[s.kind],
                    inputs=s.inputs,
                    outputs=s.outputs,
                    attention=attention.get(s.kind, ()),
                )
                for s in signatures
            },
            max_lengths=dict(signatures[0].max_lengths),
            min_lengths=dict(signatures[0].min_lengths),
            derived_axes=dict(signatures[0].derived_axes),
            length_multiples=dict(signatures[0].length_multiples),
            lengths=dict(signatures[0].lengths),
            attention_weights=signatures[0].attention_weights,
            refuses_nan=refuses_nan,
            branches_as_traced=tuple(spec.branches),
            encoder=spec.encoder,
            classifier=spec.classifier,
            tokenizer=TOKENIZER_FILE if spec.tokenizer is not None else None,
            weights=WEIGHTS_FILE if (folder / WEIGHTS_FILE).exists() else None,
            golden=GOLDEN_FILE,
            parity_report=PARITY_FILE,
            files={path.name: file_hash(path) for path in sorted(folder.iterdir())},
            made_with=self._made_with(),
            source=self.source,
        )


def write_graphs(graphs: Mapping[str, onnx.ModelProto], folder: Path) -> None:
    """Writes graphs by file name, and each distinct tensor once. Modifies the graphs."""
    tensors = {
        _digest(tensor): tensor.raw_data
        for graph in graphs.values()
        for tensor in graph.graph.initializer
        if len(tensor.raw_data) >= EXTERNAL_TENSOR_BYTES
    }
    if sum(map(len, tensors.values())) >= EXTERNAL_BYTES:
        offsets = _write_weights(tensors, folder / WEIGHTS_FILE)
        for graph in graphs.values():
            _refer_to_weights(graph, offsets)
    for name, graph in graphs.items():
        (folder / name).write_bytes(graph.SerializeToString(deterministic=True))
        onnx.checker.check_model(folder / name)


def _write_weights(tensors: Mapping[str, bytes], path: Path) -> dict[str, int]:
    """Writes each distinct tensor once. Returns the offsets by hash."""
    offsets = {}
    with path.open("wb") as file:
        for digest, data in tensors.items():
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            offsets[digest] = file.tell()
            file.write(data)
    return offsets


def _refer_to_weights(graph: onnx.ModelProto, offsets: Mapping[str, int]) -> None:
    for tensor in graph.graph.initializer:
        offset = offsets.get(_digest(tensor))
        if offset is not None:
            set_external_data(tensor, WEIGHTS_FILE, offset=offset, length=len(tensor.raw_data))
            tensor.ClearField("raw_data")


def _digest(tensor: onnx.TensorProto) -> str:
    return hashlib.sha256(tensor.raw_data).hexdigest()
