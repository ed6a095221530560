"""One ONNX file of a model with its weights inside, and a program that runs it in any ONNX Runtime."""

import shutil
from pathlib import Path

import onnx

from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.export.deployment.golden import write_golden_arrays

MODEL_FILE = "model.onnx"
RUN_FILE = "run.py"
SAMPLE = Path(__file__).with_name("sample_run.py")
# Protobuf messages are smaller than 2 GiB; the rest is for the graph itself.
MAX_WEIGHTS_BYTES = (1 << 31) - (64 << 20)


def write_model(
    artifact: Path, manifest: Manifest, folder: Path, *, max_weights_bytes: int = MAX_WEIGHTS_BYTES
) -> None:
    """Writes the plain graph of a model, `run.py` and the golden vectors that it replays.

    The graph states its origin and tolerance in its metadata. Weights of more than `max_weights_bytes` stay
    in a file beside the graph.

    Raises:
        ArtifactError: The artifact's golden vectors are damaged.
    """
    path = folder / MODEL_FILE
    shutil.copyfile(artifact / manifest.graphs[GraphKind.PLAIN].file, path)
    weights = None if manifest.weights is None else folder / manifest.weights
    if weights is not None:  # a copy, because onnx refuses files that have several hard links
        shutil.copyfile(artifact / weights.name, weights)
    inside = weights is None or weights.stat().st_size <= max_weights_bytes
    model = onnx.load(path, load_external_data=inside)
    onnx.helper.set_model_props(model, _properties(manifest))
    path.write_bytes(model.SerializeToString(deterministic=True))
    if weights is not None and inside:
        weights.unlink()
    onnx.checker.check_model(path)
    shutil.copyfile(SAMPLE, folder / RUN_FILE)
    write_golden_arrays(artifact, manifest, GraphKind.PLAIN, folder)


def _properties(manifest: Manifest) -> dict[str, str]:
    values = {
        name: getattr(manifest, name) for name in ("name", "version", "description", "precision", "source")
    }
    values |= {"rtol": manifest.tolerance.rtol, "atol": manifest.tolerance.atol}
    return {name: str(value) for name, value in values.items()}
