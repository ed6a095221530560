"""What `--target` writes beside an artifact, for Triton and for any ONNX Runtime."""

import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.export import ArtifactExistsError, ExportError, write_target
from attention_serving.export.deployment import torchserve, triton, write
from attention_serving.export.deployment.write import check_target
from attention_serving.server.engine.models.loading import versions
from tests.support import deployment
from tests.support.deployment import CROSS, ENCODER, ROTARY, SELF, TEXT
from tests.support.processes import run_python
from tests.support.triton import parse_configuration

MODELS = [SELF, CROSS, *(pytest.param(name, marks=pytest.mark.thorough) for name in (ROTARY, TEXT, ENCODER))]
PLACES = {GraphKind.PLAIN: "config.pbtxt", GraphKind.LENGTHS: "configs/lengths.pbtxt"}
TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64"}


@pytest.mark.parametrize("name", MODELS)
def test_tritons_schema_accepts_the_configurations(name: str, tmp_path: Path) -> None:
    artifact = deployment.link_model(name, tmp_path)
    graphs = Manifest.load(artifact).graphs
    written = write_target(artifact, "triton")

    kinds = [kind for kind in PLACES if kind in graphs]
    assert written == [tmp_path / name / PLACES[kind] for kind in kinds]
    for kind, path in zip(kinds, written, strict=True):
        found = parse_configuration(path.read_text())
        assert (found["name"], found["backend"]) == (name, "onnxruntime")
        assert found["default_model_filename"] == graphs[kind].file
        assert found.get("max_batch_size", 0) == (32 if kind is GraphKind.PLAIN else 0)
        assert ("dynamic_batching" in found) == (kind is GraphKind.PLAIN)
        leading = int(kind is GraphKind.PLAIN)  # the batch axis of models that Triton batches
        for side, specs in (("input", graphs[kind].inputs), ("output", graphs[kind].outputs)):
            dims = [[axis if isinstance(axis, int) else -1 for axis in spec.axes[leading:]] for spec in specs]
            assert [tensor["name"] for tensor in found[side]] == [spec.name for spec in specs]
            assert [[int(size) for size in tensor["dims"]] for tensor in found[side]] == dims
            assert [tensor["data_type"] for tensor in found[side]] == [TYPES[s.data_type] for s in specs]


def test_sequences_that_affect_each_other_are_not_batched_by_triton(tmp_path: Path) -> None:
    manifest = Manifest.load(deployment.link_model(SELF, tmp_path))
    earlier = manifest.model_copy(update={"precision": "int8", "activation_scales": None})
    found = parse_configuration(triton.configurations(earlier)["config.pbtxt"])
    assert (found["max_batch_size"], "dynamic_batching" in found) == (1, False)


def test_an_edited_configuration_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    artifact = deployment.link_model(SELF, tmp_path)
    config = write_target(artifact, "triton")[0]
    original = config.read_text()
    config.write_text(original.replace("count: 1", "count: 4"))
    with pytest.raises(ArtifactExistsError, match=r"config\.pbtxt differs .*\(--replace, replace=True\)"):
        write_target(artifact, "triton")
    assert "count: 4" in config.read_text()
    write_target(artifact, "triton", replace=True)
    assert config.read_text() == original


@pytest.mark.parametrize("name", MODELS)
def test_the_onnx_target_runs_alone_and_fails_if_a_result_differs(name: str, tmp_path: Path) -> None:
    artifact = deployment.link_model(name, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in artifact.iterdir()}
    folder = write_target(artifact, "onnx")[0].parent
    assert {path.name: path.stat().st_mtime_ns for path in artifact.iterdir()} == before
    assert versions(tmp_path, name) == [artifact.name]
    assert not [path for path in (tmp_path / name).rglob("*") if path.name.startswith(".")]

    about = onnxruntime.InferenceSession(folder / "model.onnx").get_modelmeta().custom_metadata_map
    assert (about["name"], about["version"], about["source"]) == (name, "1", Manifest.load(artifact).source)

    alone = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert sorted(path.name for path in alone.iterdir()) == ["golden.npz", "model.onnx", "run.py"]
    done = run_python("-I", alone / "run.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "context_vectors" in done.stdout
    assert all(line.endswith("equal to PyTorch") for line in done.stdout.splitlines())

    with np.load(alone / "golden.npz") as golden:
        arrays = dict(golden)
    arrays["0/outputs/context_vectors"] += np.float32(1e-2)
    np.savez(alone / "golden.npz", **arrays)
    done = run_python("-I", alone / "run.py")
    assert done.returncode == 1
    assert "Not equal to tolerance" in done.stderr


@pytest.mark.thorough
def test_weights_that_do_not_fit_into_one_file_stay_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "MAX_WEIGHTS_BYTES", 1 << 20)
    folder = write_target(deployment.link_model(ROTARY, tmp_path), "onnx")[0].parent

    assert (folder / "weights.bin").stat().st_size > 1 << 20 > (folder / "model.onnx").stat().st_size
    assert onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    done = run_python(folder / "run.py")
    assert done.returncode == 0, done.stderr


def test_a_missing_archiver_is_reported_before_anything_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ExportError, match=r"is not installed; .* pip install torch-model-archiver"):
        check_target("torchserve")


def test_an_archiver_that_fails_leaves_no_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = deployment.link_model(SELF, tmp_path / "repository")
    failing = tmp_path / torchserve.ARCHIVER
    failing.write_text("#!/bin/sh\necho the disk is full >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ExportError, match="torch-model-archiver failed: the disk is full"):
        write_target(artifact, "torchserve")
    assert not (artifact.parent / "torchserve").exists()
