"""Proves an artifact on this machine by its golden vectors, and signs what was proven."""

import platform
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from attention_serving.artifact.certificate import Machine, Proof, write_certificate
from attention_serving.artifact.encoder import tolerance_of
from attention_serving.artifact.golden import GoldenCase, golden_cases, token_inputs
from attention_serving.artifact.keys import PrivateKey
from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.artifact.runtime import unsafe_optimizers
from attention_serving.export.errors import ExportError, ParityError

# The version of the exporter, which certificates state.
VERSION = "0.1.0"
CPU_INFO = Path("/proc/cpuinfo")
CPU_PROVIDER = "CPUExecutionProvider"


class ProofProvider(StrEnum):
    """Where the golden vectors are replayed."""

    CPU = "cpu"
    CUDA = "cuda"


RUNTIME_NAMES = {ProofProvider.CPU: CPU_PROVIDER, ProofProvider.CUDA: "CUDAExecutionProvider"}


def sign_artifact(folder: Path, key: PrivateKey, provider: ProofProvider = ProofProvider.CPU) -> Path:
    """Replays the golden vectors of an artifact on this machine, and writes a signed certificate.

    A certificate that is there is replaced. Nothing else of the artifact changes.

    Args:
        folder: The artifact's folder.
        key: The private key. It is not written anywhere.
        provider: Where the golden vectors are replayed.

    Returns:
        The certificate's path.

    Raises:
        ArtifactError: The artifact is damaged.
        ExportError: The graphs do not run on the provider.
        ParityError: A golden case misses the tolerance.
    """
    import onnxruntime  # noqa: PLC0415 - takes a second, and the command's help does not need it

    manifest, encode = Manifest.load(folder), None
    manifest.verify_files(folder)
    if manifest.tokenizer is not None:
        inputs = manifest.graphs[GraphKind.PLAIN].inputs
        tokenizer = Tokenizer.from_file(str(folder / manifest.tokenizer))
        names = [spec.name for spec in inputs]
        most = manifest.max_lengths.get(str(inputs[0].axes[1]))
        encode = token_inputs(tokenizer, names, most, manifest.encoder or manifest.classifier)
    cases = golden_cases(folder, manifest, encode)
    sessions = {
        kind: _session((folder / graph.file).resolve(), provider) for kind, graph in manifest.graphs.items()
    }
    errors, ratios = zip(*(_replay(sessions[case.graph], case, manifest) for case in cases), strict=True)
    proof = Proof(
        name=manifest.name,
        version=manifest.version,
        precision=manifest.precision,
        tolerance=manifest.tolerance,
        max_abs_error=max(errors),
        max_error_ratio=max(ratios),
        cases=len(cases),
        machine=Machine(
            provider=RUNTIME_NAMES[provider],
            cpu=_cpu(),
            architecture=platform.machine(),
            system=platform.system(),
        ),
        replayed_with={
            "exporter": VERSION,
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "onnxruntime": onnxruntime.__version__,
        },
        made_with=manifest.made_with,
        branches_as_traced=manifest.branches_as_traced,
    )
    return write_certificate(folder, manifest, proof, key)


def _session(path: Path, provider: ProofProvider) -> Any:
    import onnxruntime  # noqa: PLC0415 - as above

    name = RUNTIME_NAMES[provider]
    if name not in onnxruntime.get_available_providers():
        raise ExportError(f"{name} is not available on this machine")
    # TF32 keeps 10 bits of the mantissa, which is too few for the fp32 tolerance.
    options = {"use_tf32": "0"} if provider is ProofProvider.CUDA else {}
    chosen = {name: options, CPU_PROVIDER: {}}  # the CPU computes what the provider lacks
    try:
        session = onnxruntime.InferenceSession(
            path,
            providers=[*chosen.items()],
            enable_fallback=0,
            disabled_optimizers=unsafe_optimizers(path),
        )
    except Exception as error:  # ONNX Runtime raises many types
        raise ExportError(
            f"{path.name} does not load on {provider}, so that it cannot be proven: {error}"
        ) from error
    if session.get_providers()[0] != name:
        raise ExportError(f"{name} is not available on this machine")
    return session


def _replay(session: Any, case: GoldenCase, manifest: Manifest) -> tuple[float, float]:
    """The largest difference from the golden vectors, absolute and as a part of the tolerance."""
    names = sorted(case.outputs)
    try:
        outputs = session.run(names, case.inputs)
    except Exception as error:  # ONNX Runtime raises many types
        raise ExportError(f"graph {case.graph} does not run on its golden vectors: {error}") from error
    pairs = {name: (value, case.outputs[name]) for name, value in zip(names, outputs, strict=True)}
    largest = max((manifest.tolerance.error(*pair) for pair in pairs.values()), default=0.0)
    tolerances = {name: tolerance_of(name, pairs, manifest.tolerance) for name in pairs}
    ratio = max((tolerances[name].ratio(*pair) for name, pair in pairs.items()), default=0.0)
    if ratio > 1:
        raise ParityError(
            f"graph {case.graph} differs from {manifest.judge} by {largest:.3g} on this machine; "
            f"the tolerance is {manifest.tolerance}"
        )
    return largest, ratio


def _cpu() -> str:
    """The model of the processor, as the system names it; the architecture if it does not."""
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.exists() else []
    models = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
