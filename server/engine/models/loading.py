"""Artifacts on disk: which there are, and how one is loaded, proven on this machine, and measured."""

import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attention_serving.artifact.certificate import CERTIFICATE_FILE, check_certificate
from attention_serving.artifact.encoder import NO_QUERY, tolerance_of
from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.golden import Arrays, GoldenCase, golden_cases
from attention_serving.artifact.keys import PublicKey
from attention_serving.artifact.manifest import (
    IN_BLOCKS,
    MANIFEST_FILE,
    Graph,
    GraphKind,
    Manifest,
    check_inside,
    damage,
    read_manifest,
)
from attention_serving.artifact.names import NAME_PATTERN, is_model_name, is_version
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.server import machine
from attention_serving.server.engine.limits import MAX_TOLERANCE, select_versions
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.copies import ArtifactCopy
from attention_serving.server.engine.models.repository import FailedModel, Key, Model
from attention_serving.server.engine.requests.tokenizer import TextLimits, TextTokenizer
from attention_serving.server.engine.run.calibration import calibrate
from attention_serving.server.engine.run.provider import Device, ProviderError
from attention_serving.server.engine.run.session import OUT_OF_MEMORY, Session
from attention_serving.server.engine.types import Array
from attention_serving.server.errors import ServerError

log = logging.getLogger(__name__)
# Weights of smaller artifacts are prepacked in every graph's session.
SMALL_ARTIFACT_BYTES = 64 << 20
# The runtime's names of the element types of manifests.
RUNTIME_TYPES = {"float32": "tensor(float)", "int64": "tensor(int64)", "bool": "tensor(bool)"}
# Memory that a model needs, as a multiple of its files (weights in the layout of the kernels, for runs on one
# thread and on all) and in addition to it.
HEADROOM_FACTOR, HEADROOM_BYTES = 3, 64 << 20
STATE_FILE = ".loaded-models.json"
# Identifies the content of an artifact without reading it: name, inode, size and time of change of each file.
Signature = tuple[tuple[str, int, int, int], ...]


class Parity(NamedTuple):
    """How far the outputs of a golden case are from those of its judge.

    Attributes:
        ratio: The largest part of the tolerance that is used; above 1 an output misses it.
        error: Largest absolute difference.
        reason: By how much the worst output differs, for callers.
    """

    ratio: float
    error: float
    reason: str


@dataclass(frozen=True)
class ModelStore:
    """A folder of artifacts, `<name>/<version>/`.

    Attributes:
        folder: The folder.
        device: Where graphs run.
        max_tolerance: Upper bound of the tolerances that a manifest may state, relative and absolute.
        policy: Which versions are served; see `select_versions`.
        proof_keys: If there are any, each artifact must have a certificate that one of them verifies.
    """

    folder: Path
    device: Device
    max_tolerance: float = MAX_TOLERANCE
    policy: str = "all"
    proof_keys: tuple[PublicKey, ...] = ()

    def names(self) -> list[str]:
        """The names of all models, sorted.

        Raises:
            ServerError: The folder does not exist, or cannot be read.
        """
        try:
            if not self.folder.is_dir():
                raise ServerError(f"model repository {self.folder} does not exist or is not a folder")
            return sorted(path.name for path in self.folder.iterdir() if versions(self.folder, path.name))
        except OSError as error:
            problem = f"cannot be read by user {os.geteuid()}: {error.strerror}"
            raise ServerError(f"model repository {self.folder} {problem}") from error

    def chosen(self, name: str) -> list[str]:
        """The versions of a model that the policy chooses, lowest first; empty if there is no such model."""
        return select_versions(self.policy, versions(self.folder, name))

    def artifacts(self) -> list[Key]:
        """Name and version of every artifact that the policy chooses.

        Raises:
            ServerError: There is none.
        """
        keys = [(name, version) for name in self.names() for version in self.chosen(name)]
        if not keys:
            raise ServerError(self.absence)
        return keys

    @property
    def absence(self) -> str:
        """Why there is no artifact in the folder."""
        return (
            f"model repository {self.folder} does not contain a <name>/<version>/ folder that user "
            f"{os.geteuid()} can read; a name must match {NAME_PATTERN}"
        )

    def signature(self, name: str, version: str) -> Signature | None:
        """Identifies the content of an artifact; None while it has no manifest, which an export writes last.

        Temporary files, whose names begin with a dot, do not count; nor does a certificate that is not
        needed.
        """
        files = []
        with suppress(OSError), os.scandir(self.folder / name / version) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_file() and entry.name[0] != ".":
                        status = entry.stat()
                        files.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns))
        if MANIFEST_FILE not in {file for file, *_ in files}:
            return None
        return tuple(sorted(file for file in files if self.proof_keys or file[0] != CERTIFICATE_FILE))

    def signatures(self, name: str) -> dict[str, Signature | None]:
        """Those of the versions of a model that the policy chooses."""
        return {version: self.signature(name, version) for version in self.chosen(name)}

    def damage(self, name: str, version: str) -> str:
        """What is wrong with the files of an artifact; empty if they are whole, or if there is no folder."""
        folder = self.folder / name / version
        # It is asked first whether there is one: it may be renamed into place at any time.
        reason = damage(folder) if folder.is_dir() else ""
        return reason and f"its files in the repository were changed; {reason}"

    def remember(self, names: Iterable[str]) -> None:
        """Keeps the names of the models that were loaded on request, if the folder can be written to."""
        file = self.folder / STATE_FILE
        temporary = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(sorted(names)) + "\n")
            temporary.replace(file)
        except OSError as error:
            log.warning("loaded models not remembered", extra={"reason": error.strerror})

    def remembered(self) -> list[str]:
        """The names that were kept last; none if they are unknown."""
        try:
            names = json.loads((self.folder / STATE_FILE).read_text())
        except (OSError, ValueError):
            return []
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def load(self, name: str, version: str) -> Model:
        """Loads an artifact, proves it on its golden vectors, and measures what its runs cost."""
        path, fields = self.folder / name / version, {"model": name, "version": version}
        started = time.monotonic()
        log.info("model loading", extra=fields)
        for handler in logging.getLogger().handlers:
            handler.flush()  # the runtime may end the process
        try:
            model = calibrate(load_model(path, self.device, self.max_tolerance, self.proof_keys))
        except (ArtifactError, MemoryError, ProviderError) as error:
            log.error("model failed to load", extra={**fields, "reason": str(error)})
            if not isinstance(error, ArtifactError):
                return FailedModel(name, version, str(error), is_transient=True)
            cause = error.__cause__
            is_transient = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
            return FailedModel(name, version, error.reason, is_transient=is_transient)
        except Exception as error:  # one model must not keep the others from being served
            log.exception("model failed to load", extra={**fields, "path": str(path)})
            reason = f"unexpected {type(error).__name__}; the server's log has details"
            return FailedModel(name, version, reason, is_transient=True)
        measured = {
            "provider": model.provider,
            "parity_max_abs_error": float(f"{model.measured_error:.3g}"),
            "seconds": round(time.monotonic() - started, 3),
        }
        log.info("model ready", extra=fields | measured)
        return model


def memory_shortfall(files: Signature) -> str:
    """Why an artifact cannot be loaded in addition to what is there; empty if it can."""
    needed = HEADROOM_BYTES + HEADROOM_FACTOR * sum(size for _, _, size, _ in files)
    free = machine.free_bytes()
    return f"it needs about {needed} bytes of memory; {free} are free" if needed > free else ""


def versions(repository: Path, name: str) -> list[str]:
    """The versions of a model on disk, lowest first; empty if the model does not exist.

    A name that is not that of a model, such as a path, does not exist, wherever it would lead.
    """
    if not is_model_name(name):
        return []
    folders = (repository / name).glob("*")
    return sorted((path.name for path in folders if is_version(path.name) and path.is_dir()), key=int)


def load_model(
    folder: Path, device: Device, max_tolerance: float = MAX_TOLERANCE, proof_keys: Sequence[PublicKey] = ()
) -> LoadedModel:
    """Loads an artifact: verifies a copy of its files, opens its graphs, replays its golden vectors.

    Args:
        folder: `<repository>/<model name>/<version>`.
        device: Where the graphs run.
        max_tolerance: Upper bound of the tolerances that the manifest may state, relative and absolute.
        proof_keys: If there are any, the artifact must have a certificate that one of them verifies.

    Raises:
        ArtifactError: The artifact is damaged, is not certified, or misses its tolerance on this machine.
        ProviderError: The execution provider is not available.
    """
    check_inside(folder, folder / MANIFEST_FILE)
    content = read_manifest(folder)
    manifest = Manifest.parse(folder, content)
    _check_manifest(manifest, folder, device, max_tolerance)
    if proof_keys:
        check_certificate(folder, manifest, proof_keys, content)
    files = ArtifactCopy(folder, manifest, content)
    folder, tokenizer = files.folder, None
    if manifest.tokenizer:
        with _explain_errors(path := folder / manifest.tokenizer, "the tokenizer does not load"):
            tokenizer = TextTokenizer(path)
    golden = folder / manifest.golden
    cases = golden_cases(folder, manifest, partial(_tokens, tokenizer, manifest) if tokenizer else None)
    with files.record_crash():
        sessions, parallel_sessions = _open_sessions(manifest, folder, device)
        for kind, session in sessions.items():
            _check_types(folder, manifest.graphs[kind], session)
        errors = [
            _prove(case, manifest, opened[case.graph], golden)
            for opened in (sessions, parallel_sessions)
            for case in cases
            if case.graph in opened
        ]
    return LoadedModel(
        manifest=manifest,
        sessions=sessions,
        tokenizer=tokenizer,
        measured_error=max(errors),
        provider=sessions[GraphKind.PLAIN].provider,
        row_multiple=device.provider.runtime.row_multiple,
        digest=files.digest,
        parallel_sessions=parallel_sessions,
        golden=tuple(cases),
        files=files,
    )


def _tokens(
    tokenizer: TextTokenizer, manifest: Manifest, text: str, second: str | None = None, *, is_query: bool
) -> Arrays:
    """The inputs of one sequence that a request with a text, or with a pair of texts, has."""
    inputs, facts = manifest.graphs[GraphKind.PLAIN].inputs, manifest.encoder
    most = manifest.max_lengths.get(str(inputs[0].axes[1]), sys.maxsize)
    if facts is not None:
        most = facts.token_limits.get("query" if is_query else "document", most)
    query = facts.query if facts is not None and is_query else NO_QUERY
    second_texts = () if second is None else (second,)
    classifier = manifest.classifier
    prompt = "" if classifier is None else classifier.default_prompt
    encoded = tokenizer.encode(
        (text,),
        TextLimits(text_tokens=most),
        second_texts=second_texts,
        template=None if classifier is None else classifier.templates.get(prompt),
        prefix="" if classifier is None else classifier.prompts.get(prompt, ""),
        cut=manifest.truncation_side,
        types=len(inputs) > 1,
        query=query,
    )
    columns = [encoded.ids.rows] if encoded.types is None else [encoded.ids.rows, encoded.types.rows]
    return {spec.name: rows[np.newaxis] for spec, rows in zip(inputs, columns, strict=False)}


def _check_manifest(manifest: Manifest, folder: Path, device: Device, max_tolerance: float) -> None:
    path = folder / MANIFEST_FILE
    if (manifest.name, str(manifest.version)) != (folder.parent.name, folder.name):
        name, expected = f"{manifest.name}/{manifest.version}", f"{folder.parent.name}/{folder.name}"
        raise ArtifactError(path, f"the manifest describes {name}, and the folder is named {expected}")
    if GraphKind.PLAIN not in manifest.graphs:
        raise ArtifactError(path, f"graph {GraphKind.PLAIN} is missing")
    if manifest.precision == "int8" and not device.provider.runtime.uses_host_cores:
        problem = f"{device.provider} has no kernels for int8, whose linear layers would run on the host"
        raise ArtifactError(path, f"{problem}; export it with --precision fp16")
    tolerance = manifest.tolerance
    if max(tolerance.rtol, tolerance.atol, 1 - (tolerance.cosine or 1)) > max_tolerance:
        limit = f"this server accepts at most {max_tolerance:g} (--max-tolerance)"
        raise ArtifactError(path, f"the tolerance is {manifest.tolerance}; {limit}")


def _open_sessions(
    manifest: Manifest, folder: Path, device: Device
) -> tuple[dict[GraphKind, Session], dict[GraphKind, Session]]:
    """One session for each graph; and one on all threads for each graph that runs a single sequence.

    On the host's cores, the first compute on the thread of their caller. To save memory, large weights are
    prepacked for the plain graph only, and no weights for graphs in blocks, whose runs are long. Texts differ
    in length, so that encoders and classifiers run mostly on the graph with lengths.
    """
    small = sum(path.stat().st_size for path in folder.iterdir()) <= SMALL_ARTIFACT_BYTES
    takes_texts = manifest.encoder or manifest.classifier
    mostly_run = {GraphKind.PLAIN, GraphKind.LENGTHS} if takes_texts else {GraphKind.PLAIN}
    prepacked = set(GraphKind) - set(IN_BLOCKS.values()) if small else mostly_run
    if not device.provider.runtime.uses_host_cores:
        return {kind: _open(manifest, folder, kind, device, prepacked) for kind in manifest.graphs}, {}
    one_thread = dataclasses.replace(device, threads=1)
    sessions = {kind: _open(manifest, folder, kind, one_thread, prepacked) for kind in manifest.graphs}
    batched = {GraphKind.LENGTHS, GraphKind.CONTEXT_WEIGHTS, GraphKind.SUFFIX}
    alone = [kind for kind in sessions if kind not in batched and device.threads != 1]
    return sessions, {kind: _open(manifest, folder, kind, device, {GraphKind.PLAIN}) for kind in alone}


def _open(
    manifest: Manifest, folder: Path, kind: GraphKind, device: Device, prepacked: Collection[GraphKind]
) -> Session:
    path = folder / manifest.graphs[kind].file
    with _explain_errors(path, f"the {manifest.precision} graph does not load on {device.provider}"):
        # Resolved: ONNX Runtime compares the real folders of a graph and its weights.
        return Session(path.resolve(), device, prepack_weights=kind in prepacked)


def _check_types(folder: Path, graph: Graph, session: Session) -> None:
    """Refuses a graph whose outputs have other element types than its manifest states."""
    for spec in graph.outputs:
        if (runtime_type := session.types[spec.name]) != RUNTIME_TYPES[spec.data_type]:
            problem = f"{spec.name} is {runtime_type}; the manifest states {spec.data_type}"
            raise ArtifactError(folder / graph.file, problem)


def _prove(case: GoldenCase, manifest: Manifest, session: Session, golden: Path) -> float:
    """Runs a golden case and returns the largest difference from its outputs."""
    with _explain_errors(golden, f"graph {case.graph} does not run"):
        parity = replay(case, session, manifest, where="on this machine")
    if parity.ratio > 1:
        raise ArtifactError(golden, parity.reason)
    return parity.error


@contextmanager
def _explain_errors(path: Path, what: str) -> Iterator[None]:
    """Errors of libraries, which raise many types, as those of an artifact, which say what does not work."""
    try:
        yield
    except (ProviderError, MemoryError):
        raise
    except Exception as error:
        if any(text in str(error) for text in OUT_OF_MEMORY):
            raise MemoryError(str(error)) from error
        raise ArtifactError(path, what, details=error) from error


def replay(case: GoldenCase, session: Session, manifest: Manifest, *, where: str) -> Parity:
    """Runs a golden case and compares every output that it contains.

    Args:
        case: Inputs of the session's graph, and outputs of its judge.
        session: The session, which may serve requests at the same time.
        manifest: That of the model, with the tolerance and the judge.
        where: Where the case is replayed, for the reason.

    Raises:
        MemoryError: The run needs more memory than the arena may take.
        Exception: The run fails.
    """
    compared = compare(session.run(case.inputs), case.outputs, manifest.tolerance)
    ratio, error, name = max(compared)
    reason = (
        f"{name} of graph {case.graph} differs from {manifest.judge} by {error:.3g} {where}; "
        f"the tolerance is {manifest.tolerance}"
    )
    return Parity(ratio, max(error for _, error, _ in compared), reason)


def compare(
    outputs: Mapping[str, Array], expected: Mapping[str, Array], tolerance: Tolerance
) -> list[tuple[float, float, str]]:
    """For each output that both have: the part of the tolerance that is used, the error, and the name."""
    return [(0.0, 0.0, "")] + [
        (
            tolerance_of(name, expected, tolerance).ratio(outputs[name], array),
            tolerance.error(outputs[name], array),
            name,
        )
        for name, array in expected.items()
        if name in outputs
    ]
