"""Artifacts on disk: layout, hashes, sharing of weights, and all or nothing."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from attention_serving.artifact.golden import Arrays, load_golden
from attention_serving.artifact.manifest import ATTENTION_GRAPHS, IN_BLOCKS, GraphKind, Manifest
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.artifact import write_artifact
from attention_serving.export.errors import ArtifactExistsError, ExportError, ParityError
from attention_serving.export.model_id import ModelId
from attention_serving.export.parity import BLOCK_GOLDEN_GRID, GOLDEN_GRID, PARITY_GRID
from attention_serving.export.precision import FP32_TOLERANCE
from attention_serving.export.signature import AttentionModule, random_inputs, run_eager
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from tests.export.modules import ComputedMask, Disagreeing, Foreign, attention, signature
from tests.support.eager import assert_parity

MODEL = ModelId("tiny", 2)
DESCRIPTION = "a module to export"
GRAPHS = {
    GraphKind.PLAIN: "model.onnx",
    GraphKind.LENGTHS: "model.lengths.onnx",
    GraphKind.MASK: "model.mask.onnx",
    GraphKind.WEIGHTS: "model.weights.onnx",
    GraphKind.BLOCKS: "model.blocks.onnx",
    GraphKind.MASK_BLOCKS: "model.mask_blocks.onnx",
}
FILES = {*GRAPHS.values(), "manifest.json", "golden.safetensors", "parity.json"}
# Four projections of 320 x 320 are 1.6 MiB, above the size from which weights lie in a file of their own.
LARGE = AttentionConfig(d_query=320, num_heads=4)
Artifact = tuple[Path, Manifest]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An artifact with a few hundred bytes of weights, written with a umask that denies access to others."""
    mask = os.umask(0o077)
    try:
        return write_artifact(
            attention(), MODEL, tmp_path_factory.mktemp("repository"), description=DESCRIPTION
        )
    finally:
        os.umask(mask)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An artifact whose weights are shared by its graphs."""
    return write_artifact(
        attention(LARGE), MODEL, tmp_path_factory.mktemp("repository"), description=DESCRIPTION
    )


def state(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below a folder: inode, time of change and content."""
    found = {str(path.relative_to(folder)): path for path in (folder, *folder.rglob("*"))}
    return {
        name: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for name, path in found.items()
    }


def assert_runs_by_itself(path: Path, module: AttentionModule, kind: GraphKind) -> None:
    """The file alone equals eager PyTorch at a length that the exporter did not use."""
    signed = signature(module, kind)
    sizes = {"batch": 2, "query_length": 11, "mask_heads": 1, "block_rows": 4}
    inputs: Arrays = random_inputs(signed, sizes, np.random.default_rng(1))
    served = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)
    for spec, output in zip(signed.outputs, served, strict=True):
        assert_parity(output, run_eager(module, signed, inputs)[spec.name])


def test_an_artifact_is_written_to_name_and_version_without_other_files(small: Artifact) -> None:
    folder, _ = small
    assert (folder.parent.name, folder.name) == ("tiny", "2")
    assert [path.name for path in folder.parent.iterdir()] == ["2"]
    assert {path.name for path in folder.iterdir()} == FILES


@pytest.mark.parametrize("size", ["small", "large"])
def test_the_manifest_lists_the_hash_of_every_other_file(size: str, request: pytest.FixtureRequest) -> None:
    folder, manifest = request.getfixturevalue(size)
    assert Manifest.load(folder) == manifest
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    manifest.verify_files(folder)


def test_the_manifest_describes_the_module(small: Artifact) -> None:
    _, manifest = small
    module = attention()
    assert (manifest.name, manifest.version, manifest.description) == ("tiny", 2, "a module to export")
    assert AttentionConfig(**manifest.config) == module.config
    assert manifest.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert {kind: graph.file for kind, graph in manifest.graphs.items()} == GRAPHS
    assert manifest.cost.flops_per_pair == module.config.flops_per_pair
    assert manifest.tolerance == FP32_TOLERANCE


def test_the_parity_report_lists_every_case_of_every_graph(small: Artifact) -> None:
    folder, manifest = small
    report = json.loads((folder / manifest.parity_report).read_bytes())
    counted = [sum(case["graph"] == kind for case in report["cases"]) for kind in ATTENTION_GRAPHS]
    assert counted == [len(PARITY_GRID)] * len(ATTENTION_GRAPHS)
    assert report["tolerance"] == manifest.tolerance.model_dump()
    assert report["max_abs_error"] == max(case["max_abs_error"] for case in report["cases"])


def test_the_golden_vectors_are_the_outputs_of_eager_pytorch(small: Artifact) -> None:
    folder, manifest = small
    cases = load_golden(folder / manifest.golden)
    counted = {kind: sum(case.graph is kind for case in cases) for kind in ATTENTION_GRAPHS}
    in_blocks = dict.fromkeys(IN_BLOCKS.values(), len(BLOCK_GOLDEN_GRID))
    assert counted == dict.fromkeys(ATTENTION_GRAPHS, len(GOLDEN_GRID)) | in_blocks
    for case in cases:
        eager = run_eager(attention(), signature(attention(), case.graph), case.inputs)
        assert case.outputs.keys() == eager.keys()
        for name, array in eager.items():
            np.testing.assert_array_equal(case.outputs[name], array)


def test_servers_of_other_users_may_read_an_artifact(small: Artifact) -> None:
    folder, _ = small
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


@pytest.mark.parametrize("kind", ATTENTION_GRAPHS)
def test_a_small_graph_runs_by_itself(kind: GraphKind, small: Artifact, tmp_path: Path) -> None:
    alone = tmp_path / "renamed.onnx"
    shutil.copy(small[0] / GRAPHS[kind], alone)
    assert_runs_by_itself(alone, attention(), kind)


@pytest.mark.parametrize("kind", ATTENTION_GRAPHS)
def test_a_large_graph_runs_beside_its_weights(kind: GraphKind, large: Artifact, tmp_path: Path) -> None:
    shutil.copy(large[0] / "weights.bin", tmp_path)
    alone = tmp_path / "renamed.onnx"
    shutil.copy(large[0] / GRAPHS[kind], alone)
    assert_runs_by_itself(alone, attention(LARGE), kind)


def test_the_graphs_of_a_large_model_share_one_file_of_weights(large: Artifact) -> None:
    folder, _ = large
    assert {path.name for path in folder.iterdir()} == {*FILES, "weights.bin"}
    weights = 4 * 320 * 320 * 4
    assert weights <= (folder / "weights.bin").stat().st_size < 1.05 * weights
    assert sum((folder / name).stat().st_size for name in GRAPHS.values()) < 0.1 * weights


def test_writing_the_same_artifact_again_changes_nothing(small: Artifact) -> None:
    folder, manifest = small
    before = state(folder)
    assert write_artifact(attention(), MODEL, folder.parents[1], description=DESCRIPTION) == (
        folder,
        manifest,
    )
    assert state(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["2"]


def test_another_artifact_is_refused_unless_replace_is_given(small: Artifact, tmp_path: Path) -> None:
    folder = shutil.copytree(small[0], tmp_path / "tiny" / "2")
    before, other = state(folder.parent)["2/manifest.json"], attention(seed=1)
    with pytest.raises(ArtifactExistsError, match=str(folder)):
        write_artifact(other, MODEL, tmp_path, description=DESCRIPTION)
    assert state(folder.parent)["2/manifest.json"] == before
    found, manifest = write_artifact(other, MODEL, tmp_path, replace=True, description=DESCRIPTION)
    assert (found, Manifest.load(folder)) == (folder, manifest)
    assert manifest.files["model.onnx"] != small[1].files["model.onnx"]
    manifest.verify_files(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["2"]


def test_an_artifact_of_another_source_is_refused_before_the_export_begins(small: Artifact) -> None:
    folder, steps = small[0], list[str]()
    with pytest.raises(
        ArtifactExistsError, match=r"holds another artifact; replace it \(replace=True\), .*: 3 is free"
    ):
        write_artifact(
            attention(seed=1), MODEL, folder.parents[1], description=DESCRIPTION, progress=steps.append
        )
    assert steps == []


def test_a_damaged_artifact_is_refused_before_the_export_begins(small: Artifact, tmp_path: Path) -> None:
    folder, steps = shutil.copytree(small[0], tmp_path / "tiny" / "2"), list[str]()
    (folder / "model.onnx").write_bytes(b"damaged")
    with pytest.raises(ArtifactExistsError, match=r"holds a damaged artifact \(.*model.onnx"):
        write_artifact(attention(), MODEL, tmp_path, description=DESCRIPTION, progress=steps.append)
    assert steps == []


def test_an_artifact_without_a_recorded_source_is_compared_after_the_export(
    small: Artifact, tmp_path: Path
) -> None:
    """Earlier versions recorded none."""
    folder, steps = shutil.copytree(small[0], tmp_path / "tiny" / "2"), list[str]()
    earlier = small[1].model_copy(update={"source": ""})
    (folder / "manifest.json").write_text(earlier.model_dump_json())
    write_artifact(attention(), MODEL, tmp_path, description=DESCRIPTION, progress=steps.append)
    assert "graph plain: export" in steps
    assert Manifest.load(folder) == earlier


@pytest.mark.parametrize(
    ("kind", "error"),
    [pytest.param(Disagreeing, ParityError, id="parity"), pytest.param(Foreign, ExportError, id="export")],
)
def test_a_failure_leaves_nothing_behind(
    kind: type[MultiHeadAttention], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        write_artifact(attention(kind=kind), MODEL, tmp_path, description=DESCRIPTION)
    assert not [path for path in tmp_path.rglob("*") if path != tmp_path / "tiny"]


def test_a_wider_tolerance_is_applied_and_recorded(tmp_path: Path) -> None:
    wide = Tolerance(rtol=0, atol=0.1)
    folder, manifest = write_artifact(
        attention(kind=Disagreeing), MODEL, tmp_path, tolerance=wide, description=DESCRIPTION
    )
    report: dict[str, Any] = json.loads((folder / manifest.parity_report).read_bytes())
    assert manifest.tolerance == wide
    assert report["tolerance"] == {"rtol": 0, "atol": 0.1}
    assert FP32_TOLERANCE.atol < report["max_abs_error"] < wide.atol


@pytest.mark.parametrize("name", ["a", "0", "self-attention", "multi_head.768x12", "A" * 128])
def test_a_name_is_letters_digits_and_a_few_signs(name: str) -> None:
    assert ModelId(name).name == name


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-a", "_a", "a/b", "../a", "a b", "é", "A" * 129])
def test_any_other_name_is_refused_by_value_and_rule(name: str) -> None:
    with pytest.raises(ValueError, match="must match") as refusal:
        ModelId(name)
    assert f"name={name!r}: " in str(refusal.value)


def test_a_name_with_a_line_break_is_refused() -> None:
    with pytest.raises(ValueError, match="must match"):
        ModelId("tiny\n")


@pytest.mark.parametrize("version", [0, -1])
def test_a_version_below_1_is_refused_by_value_and_rule(version: int) -> None:
    with pytest.raises(ValueError, match=f"version={version}: must be a positive integer"):
        ModelId("tiny", version)


def test_golden_vectors_of_blocks_need_several_blocks_and_one_with_fewer_rows(small: Artifact) -> None:
    folder, manifest = small
    for kind in IN_BLOCKS.values():
        cases = [case for case in load_golden(folder / manifest.golden) if case.graph is kind]
        sizes = [(case.inputs["query"].shape[1], int(case.inputs["block_rows"])) for case in cases]
        assert any(length > 2 * rows and length % rows for length, rows in sizes)


def test_a_module_without_a_form_in_blocks_lacks_those_graphs(tmp_path: Path) -> None:
    folder, manifest = write_artifact(attention(kind=ComputedMask), MODEL, tmp_path)
    whole = set(ATTENTION_GRAPHS) - set(IN_BLOCKS.values())
    assert set(manifest.graphs) == whole
    assert {case.graph for case in load_golden(folder / manifest.golden)} == whole
    assert not (folder / GRAPHS[GraphKind.BLOCKS]).exists()
    manifest.verify_files(folder)
