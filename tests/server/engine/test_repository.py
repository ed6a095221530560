"""Which models a repository holds, and what a damaged artifact does: it fails alone and says why."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from server.engine.engine import Engine
from server.engine.errors import ModelNotFoundError, ModelNotReadyError
from server.engine.model import LoadedModel
from server.engine.provider import Device
from server.engine.repository import FailedModel, Repository, RepositoryError, load_repository
from tests.server.samples import CROSS, SELF, assert_answers, request_of, validated_of

DEVICE = Device(threads=1)
MANIFEST, GOLDEN, GRAPH = "manifest.json", "golden.safetensors", "model.lengths.onnx"


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    edit(content)
    (folder / MANIFEST).write_text(json.dumps(content))


def rehash(folder: Path, file: str) -> None:
    """Makes the manifest vouch for a file as it now is."""
    digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    edit_manifest(folder, lambda content: content["files"].update({file: digest}))


def change_byte(folder: Path) -> None:
    content = bytearray((folder / GRAPH).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / GRAPH).write_bytes(content)


def replace_graph(folder: Path) -> None:
    (folder / GRAPH).write_bytes(b"not a graph")
    rehash(folder, GRAPH)


def edit_golden(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    save_file(edit(load_file(folder / GOLDEN)), folder / GOLDEN)
    rehash(folder, GOLDEN)


def miss_tolerance(tensors: dict[str, Any]) -> dict[str, Any]:
    name = next(name for name in tensors if name.startswith("mask/") and name.endswith("context_vectors"))
    moved = tensors[name].copy()
    moved.flat[-1] += np.float32(1e-3)
    return {**tensors, name: moved}


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "manifest missing": (lambda folder: (folder / MANIFEST).unlink(), MANIFEST, "No such file"),
    "manifest not json": (lambda folder: (folder / MANIFEST).write_text("{"), MANIFEST, "Invalid JSON"),
    "manifest with an unknown key": (
        lambda folder: edit_manifest(folder, lambda content: content.update(surprise=1)),
        MANIFEST,
        "surprise",
    ),
    "manifest of another version": (
        lambda folder: edit_manifest(folder, lambda content: content.update(version=2)),
        f"{SELF}/1",
        f"the manifest describes {SELF}/2",
    ),
    "manifest without a hash": (
        lambda folder: edit_manifest(folder, lambda content: content["files"].pop(GRAPH)),
        MANIFEST,
        f"lists no hash for {GRAPH}",
    ),
    "manifest without a graph": (
        lambda folder: edit_manifest(folder, lambda content: content["graphs"].pop("plain")),
        GOLDEN,
        "graph plain does not run",
    ),
    "file missing": (lambda folder: (folder / GRAPH).unlink(), GRAPH, "No such file"),
    "byte changed": (change_byte, GRAPH, "the manifest says"),
    "graph unparsable": (replace_graph, GRAPH, "Protobuf parsing failed"),
    "golden vectors missed": (
        lambda folder: edit_golden(folder, miss_tolerance),
        GOLDEN,
        "context_vectors of graph mask differs from eager PyTorch by 0.001",
    ),
    "no golden vectors": (
        lambda folder: edit_golden(folder, lambda _: {}),
        GOLDEN,
        "contains no golden vectors",
    ),
    "golden names unreadable": (
        lambda folder: edit_golden(folder, lambda tensors: {"odd": next(iter(tensors.values()))}),
        GOLDEN,
        "not enough values to unpack",
    ),
}


@pytest.fixture
def copies(artifacts: Path, tmp_path: Path) -> Path:
    """A repository of two models, free to be damaged."""
    for name in (SELF, CROSS):
        shutil.copytree(artifacts / name, tmp_path / name)
    return tmp_path


def assert_only_one_failed(repository: Repository) -> FailedModel:
    failed = repository.find(SELF)
    assert isinstance(failed, FailedModel)
    assert (failed.name, failed.version) == (SELF, "1")
    healthy = validated_of(repository.ready(CROSS), [(2, 3)])
    engine = Engine(repository)
    assert_answers(healthy, engine.submit(healthy.model, request_of(healthy.model, [(2, 3)])).result())
    engine.close()
    return failed


@pytest.mark.parametrize(("damage", "file", "says"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_artifact_fails_alone_and_names_the_file(
    copies: Path, damage: Callable[[Path], object], file: str, says: str
) -> None:
    damage(copies / SELF / "1")
    failed = assert_only_one_failed(load_repository(copies, DEVICE))
    assert file in failed.reason
    assert says in failed.reason


def test_a_golden_output_that_its_graph_has_not_fails_one_model_alone(copies: Path) -> None:
    edit_golden(
        copies / SELF / "1",
        lambda tensors: {name.replace("context_vectors", "other"): array for name, array in tensors.items()},
    )
    assert GOLDEN in assert_only_one_failed(load_repository(copies, DEVICE)).reason


def test_a_model_is_ready_only_when_each_of_its_graphs_was_replayed(copies: Path) -> None:
    edit_golden(
        copies / SELF / "1",
        lambda tensors: {name: array for name, array in tensors.items() if name.startswith("plain/")},
    )
    assert isinstance(load_repository(copies, DEVICE).find(SELF), FailedModel)


def test_a_folder_of_another_name_fails(copies: Path) -> None:
    (copies / SELF).rename(copies / "renamed")
    failed = load_repository(copies, DEVICE).find("renamed")
    assert isinstance(failed, FailedModel)
    assert f"the manifest describes {SELF}/1" in failed.reason


def test_a_model_that_failed_is_not_ready_and_says_why(copies: Path) -> None:
    (copies / SELF / "1" / GRAPH).unlink()
    repository = load_repository(copies, DEVICE)
    with pytest.raises(ModelNotReadyError, match=rf"'{SELF}' version 1 failed to load: .*{GRAPH}"):
        repository.ready(SELF)


def fake(*names: tuple[str, str]) -> Repository:
    """Models need not load to be found."""
    return Repository([FailedModel(name, version, "") for name, version in names])


def test_versions_are_ordered_as_numbers() -> None:
    repository = fake(("b", "1"), ("a", "10"), ("a", "9"), ("a", "2"))
    assert repository.find("a").version == "10"
    assert repository.find("a", "2").version == "2"
    assert [(m.name, m.version) for m in repository] == [("a", "2"), ("a", "9"), ("a", "10"), ("b", "1")]


@pytest.mark.parametrize(
    ("name", "version", "field", "message"),
    [
        ("c", "", "model_name", "model 'c' does not exist; there are: a, b"),
        ("", "", "model_name", "model '' does not exist; there are: a, b"),
        ("a", "3", "model_version", "model 'a' has no version '3'; there are: 2, 10"),
        ("a", "02", "model_version", "model 'a' has no version '02'; there are: 2, 10"),
    ],
    ids=["name", "no name", "version", "version in other writing"],
)
def test_an_unknown_model_is_answered_with_those_that_there_are(
    name: str, version: str, field: str, message: str
) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        fake(("b", "1"), ("a", "10"), ("a", "2")).find(name, version)
    assert (caught.value.field, caught.value.message) == (field, message)


def test_every_model_publishes_an_error_within_its_tolerance(models: dict[str, LoadedModel]) -> None:
    assert len(models) == 3
    for model in models.values():
        assert 0 <= model.measured_error < 1e-5
        assert model.provider == "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("folders", "says"),
    [
        (None, "does not exist or is not a folder"),
        ([], "does not contain a <name>/<version>/ folder"),
        (["name/one", "name/0", "name/01", "name/.1.tmp"], "does not contain a <name>/<version>/ folder"),
    ],
    ids=["absent", "empty", "no version is a number"],
)
def test_a_repository_without_models_is_refused(tmp_path: Path, folders: list[str] | None, says: str) -> None:
    root = tmp_path / "repository"
    if folders is not None:
        root.mkdir()
        for folder in folders:
            (root / folder).mkdir(parents=True)
    with pytest.raises(RepositoryError, match=says):
        load_repository(root, DEVICE)


def test_the_highest_version_answers_where_none_is_named(copies: Path) -> None:
    shutil.copytree(copies / SELF / "1", copies / SELF / "10")
    edit_manifest(copies / SELF / "10", lambda content: content.update(version=10))
    repository = load_repository(copies, DEVICE)
    assert repository.ready(SELF).version == "10"
    assert repository.ready(SELF, "1").version == "1"
