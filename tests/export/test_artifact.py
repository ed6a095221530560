"""Artifacts on disk: layout, hashes, sharing of weights, and all or nothing."""

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_serving.artifact.golden import load_golden
from attention_serving.artifact.manifest import ATTENTION_GRAPHS, IN_BLOCKS, Manifest
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export import export_module
from attention_serving.export.artifact import GRAPH_FILES, UNCHANGED
from attention_serving.export.errors import ArtifactExistsError, ExportError, ParityError
from attention_serving.export.parity import BLOCK_GOLDEN_GRID, GOLDEN_GRID, PARITY_GRID
from attention_serving.export.precision import FP32_TOLERANCE
from attention_serving.export.signature import run_eager
from attention_serving.export.target import temporary_folder
from attention_serving.model.config import AttentionConfig
from tests.export.modules import signature
from tests.server.samples import SELF, eager_module
from tests.support import deployment
from tests.support.eager import assert_parity
from tests.support.processes import run_python

GRAPHS = {kind: GRAPH_FILES[kind] for kind in ATTENTION_GRAPHS}
FILES = {*GRAPHS.values(), "manifest.json", "golden.safetensors", "parity.json"}
Artifact = tuple[Path, Manifest]


class Disagreeing(nn.Module):
    """Computes something else in its graph than in eager PyTorch."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear
        return input * (1.001 if torch.compiler.is_exporting() else 1.0)


class Random(nn.Module):
    """ONNX Runtime has no kernel for its operator on a CPU."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input + torch.rand_like(input) * 0


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


def export(module: nn.Module, repository: Path, **options: Any) -> Artifact:
    """Writes version 2 of the model tiny, which has one graph."""
    axes = {"input": {0: "batch", 1: "sequence"}}
    given: dict[str, Any] = {"name": "tiny", "version": 2} | options
    return export_module(module, (torch.zeros(2, 3, 4),), axes, out=repository, **given)


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of a folder and all files in it."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (folder, *folder.iterdir())}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An artifact that was written with a umask that denies access to others."""
    mask = os.umask(0o077)
    try:
        return export(linear(), tmp_path_factory.mktemp("repository"))
    finally:
        os.umask(mask)


@pytest.fixture
def copy(small: Artifact, tmp_path: Path) -> Path:
    return shutil.copytree(small[0], tmp_path / "tiny" / "2")


def test_an_artifact_is_written_to_name_and_version_for_all_users(small: Artifact) -> None:
    folder, manifest = small
    assert (folder.parent.name, folder.name) == ("tiny", "2")
    assert [path.name for path in folder.parent.iterdir()] == ["2"]
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert Manifest.load(folder) == manifest
    assert manifest.description == "Linear"


def test_the_manifest_describes_an_attention_module_and_every_file(artifacts: Path) -> None:
    folder, module = artifacts / SELF / "1", eager_module(SELF)
    manifest = Manifest.load(folder)
    assert {path.name for path in folder.iterdir()} == FILES == {*manifest.files, "manifest.json"}
    assert (manifest.name, manifest.version, manifest.causal, manifest.num_heads) == (SELF, 1, True, 2)
    assert AttentionConfig(**manifest.config) == module.config
    assert manifest.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert {kind: graph.file for kind, graph in manifest.graphs.items()} == GRAPHS
    assert manifest.cost.flops_per_pair == module.config.flops_per_pair
    report = json.loads((folder / manifest.parity_report).read_bytes())
    counted = Counter(case["graph"] for case in report["cases"])
    assert counted == dict.fromkeys(ATTENTION_GRAPHS, len(PARITY_GRID))
    assert report["tolerance"] == manifest.tolerance.model_dump() == FP32_TOLERANCE.model_dump()
    # Masks for all heads and masks for each head take turns.
    assert {case["sizes"].get("mask_heads") for case in report["cases"]} == {None, 1, 2}


def test_the_golden_vectors_are_the_outputs_of_eager_pytorch(artifacts: Path) -> None:
    cases, module = load_golden(artifacts / SELF / "1" / "golden.safetensors"), eager_module(SELF)
    counted = Counter(case.graph for case in cases)
    in_blocks = dict.fromkeys(IN_BLOCKS.values(), len(BLOCK_GOLDEN_GRID))
    assert counted == dict.fromkeys(ATTENTION_GRAPHS, len(GOLDEN_GRID)) | in_blocks
    blocks = [
        (len(case.inputs["query"][0]), int(case.inputs["block_rows"]))
        for case in cases
        if "block_rows" in case.inputs
    ]
    assert any(length > 2 * rows and length % rows for length, rows in blocks)
    for case in cases:
        eager = run_eager(module, signature(module, case.graph), case.inputs)
        assert case.outputs.keys() == eager.keys()
        for name, array in eager.items():
            assert_parity(case.outputs[name], array)


def test_the_same_artifact_changes_nothing_and_another_is_refused_unless_it_is_to_be_replaced(
    small: Artifact, copy: Path, tmp_path: Path
) -> None:
    before, steps = state(copy), list[str]()
    export(linear(), tmp_path, progress=steps.append)
    assert (steps.pop(), state(copy)) == (UNCHANGED, before)
    steps.clear()
    says = rf"{copy} holds another artifact; replace it \(--replace, replace=True\), .*: 3 is free"
    with pytest.raises(ArtifactExistsError, match=says):
        export(linear(seed=1), tmp_path, progress=steps.append)
    assert (steps, state(copy)) == ([], before)
    (copy / "model.onnx").write_bytes(b"damaged")
    with pytest.raises(ArtifactExistsError, match="holds a damaged artifact"):
        export(linear(), tmp_path, progress=steps.append)
    assert steps == []
    folder, manifest = export(linear(seed=1), tmp_path, replace=True)
    assert (folder, Manifest.load(folder)) == (copy, manifest)
    assert manifest.files["model.onnx"] != small[1].files["model.onnx"]
    manifest.verify_files(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["2"]


@pytest.mark.parametrize(
    ("module", "error", "says"),
    [
        (Disagreeing(), ParityError, "or on being traced, or keep values between calls"),
        (Random(), ExportError, "no CPU kernels"),
    ],
    ids=["parity", "kernels"],
)
def test_a_failure_leaves_nothing_behind(
    module: nn.Module, error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        export(module, tmp_path)
    assert not list(tmp_path.iterdir())


# Is killed while it writes.
KILLED = """
import os, signal, sys
from pathlib import Path
from attention_serving.export.target import temporary_folder

with temporary_folder(Path(sys.argv[1])) as folder:
    (folder / "model.onnx").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_export_left_is_removed_by_the_next_and_what_another_writes_is_not(
    tmp_path: Path,
) -> None:
    with temporary_folder(tmp_path / "2") as other_version, temporary_folder(tmp_path / "1") as first:
        assert run_python("-c", KILLED, tmp_path / "1").returncode == -signal.SIGKILL
        assert len(list(tmp_path.iterdir())) == 3
        with temporary_folder(tmp_path / "1") as second:
            assert {*tmp_path.iterdir()} == {other_version, first, second}


def test_what_an_export_left_that_was_killed_while_it_replaced_an_artifact_is_put_back(
    tmp_path: Path,
) -> None:
    target, retired = tmp_path / "1", tmp_path / ".1.abcdefgh.retired"
    for expected in ("before", "after"):
        retired.mkdir()
        (retired / "before").touch()
        with temporary_folder(target) as temporary:
            assert {*tmp_path.iterdir()} == {target, temporary}
            assert [path.name for path in target.iterdir()] == [expected]
        (target / expected).rename(target / "after")


def test_a_wider_tolerance_is_applied_and_recorded(tmp_path: Path) -> None:
    _, manifest = export(Disagreeing(), tmp_path, tolerance=Tolerance(rtol=0, atol=0.1))
    assert manifest.tolerance == Tolerance(rtol=0, atol=0.1)


@pytest.mark.thorough
def test_the_graphs_of_a_large_model_share_one_file_of_weights(tmp_path: Path) -> None:
    folder = deployment.link_model(deployment.ROTARY, tmp_path)
    module = deployment.eager_module(deployment.ROTARY)
    assert {path.name for path in folder.iterdir()} == {*FILES, "weights.bin"}
    weights = sum(parameter.numel() * 4 for parameter in module.parameters())
    assert weights <= (folder / "weights.bin").stat().st_size < 1.05 * weights
    assert sum((folder / name).stat().st_size for name in GRAPHS.values()) < 0.1 * weights
