"""Loads an artifact: verifies its files, opens its graphs, and replays its golden vectors on this machine."""

import dataclasses
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from attention_serving.artifact.certificate import check_certificate
from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.golden import GoldenCase, check_golden, load_golden
from attention_serving.artifact.keys import PublicKey
from attention_serving.artifact.manifest import IN_BLOCKS, MANIFEST_FILE, GraphKind, Manifest, check_inside
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.server.engine.limits import MAX_TOLERANCE
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.tokenizer import TextEncoder
from attention_serving.server.engine.run.provider import Device, ProviderError
from attention_serving.server.engine.run.session import RunControl, Session

# Weights of smaller artifacts are prepacked in every graph's session.
SMALL_ARTIFACT_BYTES = 64 << 20


class Parity(NamedTuple):
    """How far the outputs of a golden case are from those of eager PyTorch.

    Attributes:
        ratio: The largest part of the tolerance that is used; above 1 an output misses it.
        error: Largest absolute difference.
        reason: By how much the worst output differs, for callers.
    """

    ratio: float
    error: float
    reason: str


def load_model(
    folder: Path,
    device: Device,
    *,
    max_tolerance: float = MAX_TOLERANCE,
    proof_keys: Sequence[PublicKey] = (),
    keep_golden: bool = False,
) -> LoadedModel:
    """Loads an artifact: verifies its files, opens its graphs, replays its golden vectors.

    Args:
        folder: `<repository>/<model name>/<version>`.
        device: Where the graphs run.
        max_tolerance: Upper bound of the tolerances that the manifest may state, relative and absolute.
        proof_keys: If there are any, the artifact must have a certificate that one of them verifies.
        keep_golden: Whether the model keeps its golden vectors, to replay them while it serves.

    Raises:
        ArtifactError: The artifact is damaged, is not certified, or misses its tolerance on this machine.
        ProviderError: The execution provider is not available.
    """
    check_inside(folder, folder / MANIFEST_FILE)
    manifest = Manifest.load(folder)
    _check_manifest(manifest, folder, max_tolerance)
    if proof_keys:
        check_certificate(folder, manifest, proof_keys)
    manifest.verify_files(folder)
    golden = folder / manifest.golden
    cases = load_golden(golden)
    check_golden(golden, cases, manifest)
    sessions = _open_sessions(manifest, folder, device)
    parallel_sessions = _open_parallel_sessions(manifest, folder, device)
    encoder = _load_text_encoder(folder / manifest.tokenizer) if manifest.tokenizer else None
    errors = [
        _replay(case, manifest, opened[case.graph], golden)
        for opened in (sessions, parallel_sessions)
        for case in cases
        if case.graph in opened
    ]
    provider = sessions[GraphKind.PLAIN].provider
    return LoadedModel(
        manifest,
        sessions,
        encoder,
        max(errors),
        provider,
        parallel_sessions=parallel_sessions,
        golden=tuple(cases) if keep_golden else (),
    )


def _check_manifest(manifest: Manifest, folder: Path, max_tolerance: float) -> None:
    path = folder / MANIFEST_FILE
    if (manifest.name, str(manifest.version)) != (folder.parent.name, folder.name):
        found, expected = f"{manifest.name}/{manifest.version}", f"{folder.parent.name}/{folder.name}"
        raise ArtifactError(path, f"the manifest describes {found}, and the folder is named {expected}")
    if GraphKind.PLAIN not in manifest.graphs:
        raise ArtifactError(path, f"graph {GraphKind.PLAIN} is missing")
    if max(manifest.tolerance.rtol, manifest.tolerance.atol) > max_tolerance:
        raise ArtifactError(
            path, f"the tolerance is {manifest.tolerance}; this server accepts at most {max_tolerance:g}"
        )


def _open_sessions(manifest: Manifest, folder: Path, device: Device) -> dict[GraphKind, Session]:
    """One session for each graph. On the host's cores, each computes on the thread of its caller.

    To save memory, large weights are prepacked for the plain graph only, and no weights for graphs in blocks,
    whose runs are long. Texts differ in length, so that encoders run mostly on the graph with lengths.
    """
    small = sum(path.stat().st_size for path in folder.iterdir()) <= SMALL_ARTIFACT_BYTES
    mostly_run = {GraphKind.PLAIN, GraphKind.LENGTHS} if manifest.encoder else {GraphKind.PLAIN}
    prepacked = set(GraphKind) - set(IN_BLOCKS.values()) if small else mostly_run
    if device.provider.runtime.uses_host_cores:
        device = dataclasses.replace(device, threads=1)
    return {kind: _open(manifest, folder, kind, device, prepacked) for kind in manifest.graphs}


def _open_parallel_sessions(manifest: Manifest, folder: Path, device: Device) -> dict[GraphKind, Session]:
    """One session on all threads for each graph that runs a single sequence.

    To save memory, weights are prepacked for the plain graph only.
    """
    if device.threads == 1 or not device.provider.runtime.uses_host_cores:
        return {}
    kinds = [kind for kind in manifest.graphs if kind is not GraphKind.LENGTHS]
    return {kind: _open(manifest, folder, kind, device, {GraphKind.PLAIN}) for kind in kinds}


def _open(
    manifest: Manifest, folder: Path, kind: GraphKind, device: Device, prepacked: Set[GraphKind]
) -> Session:
    path = folder / manifest.graphs[kind].file
    try:
        # Resolved: ONNX Runtime compares the real folders of a graph and its weights.
        return Session(path.resolve(), device, prepack_weights=kind in prepacked)
    except ProviderError:
        raise
    except Exception as error:  # ONNX Runtime raises many types
        what = f"the {manifest.precision} graph does not load on {device.provider}"
        raise ArtifactError(path, what, details=error) from error


def _load_text_encoder(path: Path) -> TextEncoder:
    try:
        return TextEncoder(path)
    except Exception as error:  # the library raises Exception itself
        raise ArtifactError(path, "the tokenizer does not load", details=error) from error


def _replay(case: GoldenCase, manifest: Manifest, session: Session, golden: Path) -> float:
    """Runs a golden case and returns the largest difference from eager PyTorch."""
    if missing := sorted(case.outputs.keys() - set(session.outputs)):
        raise ArtifactError(golden, f"graph {case.graph} does not have an output {missing[0]}")
    try:
        found = replay(case, session, manifest.tolerance, where="on this machine")
    except Exception as error:
        raise ArtifactError(golden, f"graph {case.graph} does not run", details=error) from error
    if found.ratio > 1:
        raise ArtifactError(golden, found.reason)
    return found.error


def replay(
    case: GoldenCase,
    session: Session,
    tolerance: Tolerance,
    control: RunControl | None = None,
    *,
    where: str,
) -> Parity:
    """Runs a golden case and compares every output that it contains.

    Args:
        case: Inputs of the session's graph, and outputs of eager PyTorch.
        session: The session, which may serve requests at the same time.
        tolerance: Largest accepted difference.
        control: Can end the run early.
        where: Where the case is replayed, for the reason.

    Raises:
        MemoryError: The run needs more memory than the arena may take.
        Exception: The run fails, or is ended early.
    """
    outputs = session.run(case.inputs, control)
    compared = [(0.0, 0.0, "")]
    for name, eager in case.outputs.items():
        compared.append((tolerance.ratio(outputs[name], eager), tolerance.error(outputs[name], eager), name))
    ratio, error, name = max(compared)
    reason = (
        f"{name} of graph {case.graph} differs from eager PyTorch by {error:.3g} {where}; "
        f"the tolerance is {tolerance}"
    )
    return Parity(ratio, max(error for _, error, _ in compared), reason)
