"""Models of a repository; a damaged artifact affects only its own model and names the cause."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.external_data_helper import set_external_data
from safetensors.numpy import load_file, save_file

from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import ModelNotFoundError, ModelNotReadyError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models import loading
from attention_serving.server.engine.models.loading import RepositoryError
from attention_serving.server.engine.models.repository import FailedModel, Repository
from attention_serving.server.engine.run.provider import Device
from tests.server.samples import CROSS, SELF, assert_answers, load_repository, request_of, validated_of
from tests.support.coroutines import submitted

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


def empty_graph(folder: Path) -> None:
    (folder / GRAPH).write_bytes(b"")
    rehash(folder, GRAPH)


def rename_graph(folder: Path) -> None:
    renamed = "model.lengths.ort"
    (folder / GRAPH).rename(folder / renamed)
    edit_manifest(folder, lambda content: content["graphs"]["lengths"].update(file=renamed))
    edit_manifest(folder, lambda content: content["files"].pop(GRAPH))
    rehash(folder, renamed)


def name_external_data(folder: Path, location: str) -> None:
    """Lets a graph take the bytes of its first tensor from another file, which exists beside it."""
    graph = onnx.load(folder / GRAPH)
    tensor = graph.graph.initializer[0]
    (folder / "secret.bin").write_bytes(tensor.raw_data)
    set_external_data(tensor, location)
    tensor.ClearField("raw_data")
    (folder / GRAPH).write_bytes(graph.SerializeToString())
    rehash(folder, GRAPH)


def replace_with_folder(folder: Path) -> None:
    (folder / GRAPH).unlink()
    (folder / GRAPH).mkdir()


def replace_with_pipe(folder: Path) -> None:
    (folder / GRAPH).unlink()
    os.mkfifo(folder / GRAPH)


def each(part: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Changes every golden tensor whose name contains a part."""
    return lambda tensors: {name: change(array) if part in name else array for name, array in tensors.items()}


def too_long(_: Any) -> Any:
    return np.zeros((1, 4097, 4), np.float32)


def each_output(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return each("/outputs/", change)


def without(part: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {name: array for name, array in tensors.items() if part not in name}


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "manifest missing": (lambda folder: (folder / MANIFEST).unlink(), MANIFEST, "No such file"),
    "manifest of another version": (
        lambda folder: edit_manifest(folder, lambda content: content.update(version=2)),
        MANIFEST,
        f"the manifest describes {SELF}/2, and the folder is named {SELF}/1",
    ),
    "manifest of another name": (
        lambda folder: edit_manifest(folder, lambda content: content.update(name="other")),
        MANIFEST,
        f"the manifest describes other/1, and the folder is named {SELF}/1",
    ),
    "manifest without a graph": (
        lambda folder: edit_manifest(folder, lambda content: content["graphs"].pop("plain")),
        MANIFEST,
        "graph plain is missing",
    ),
    "byte changed": (change_byte, GRAPH, "the manifest says"),
    "graph unparsable": (replace_graph, GRAPH, "is not an ONNX graph: "),
    "graph without a node": (empty_graph, GRAPH, "the fp32 graph does not load on cpu"),
    "graph under another suffix": (rename_graph, "model.lengths.ort", "must end with .onnx"),
    "weights that are not listed": (
        lambda folder: name_external_data(folder, "secret.bin"),
        GRAPH,
        "names external data that the manifest does not list: 'secret.bin'",
    ),
    "weights in another folder": (
        lambda folder: name_external_data(folder, "../../tiny-cross/1/golden.safetensors"),
        GRAPH,
        "names external data that the manifest does not list: '../../tiny-cross/1/golden.safetensors'",
    ),
    "weights in memory": (
        lambda folder: name_external_data(folder, "*/_ORT_MEM_ADDR_/*"),
        GRAPH,
        "names external data that the manifest does not list: '*/_ORT_MEM_ADDR_/*'",
    ),
    "file is a folder": (replace_with_folder, GRAPH, "is not a regular file"),
    "file is a pipe": (replace_with_pipe, GRAPH, "is not a regular file"),
    "absolute tolerance above the ceiling": (
        lambda folder: edit_manifest(folder, lambda content: content["tolerance"].update(atol=0.11)),
        MANIFEST,
        "this server accepts at most 0.1",
    ),
    "manifest too large": (
        lambda folder: edit_manifest(folder, lambda content: content.update(description="x" * (1 << 20))),
        MANIFEST,
        "is larger than the limit of 1048576 bytes",
    ),
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
        "contains a tensor 'odd', which is not named <graph>/<index>/<inputs or outputs>/<name>",
    ),
    "golden outputs that are empty": (
        lambda folder: edit_golden(folder, each_output(lambda array: array[:0])),
        GOLDEN,
        "contains no golden vectors for output context_vectors of graph plain",
    ),
    "golden outputs that are NaN": (
        lambda folder: edit_golden(folder, each_output(lambda array: np.full_like(array, np.nan))),
        GOLDEN,
        "contains no golden vectors for output context_vectors of graph plain",
    ),
    "golden vectors without weights": (
        lambda folder: edit_golden(folder, without("attention_weights")),
        GOLDEN,
        "contains no golden vectors for output attention_weights of graph weights",
    ),
    "golden vectors without lengths": (
        lambda folder: edit_golden(folder, without("key_lengths")),
        GOLDEN,
        "graph lengths takes key_lengths, query; a case of it contains query",
    ),
    "golden vectors of another width": (
        lambda folder: edit_golden(folder, each("inputs/query", lambda array: array[..., :3].copy())),
        GOLDEN,
        "which does not fit",
    ),
    "golden vectors of one graph only": (
        lambda folder: edit_golden(
            folder, lambda tensors: {name: own for name, own in tensors.items() if name.startswith("plain/")}
        ),
        GOLDEN,
        "contains no golden vectors",
    ),
    "golden vectors of an output that the graph lacks": (
        lambda folder: edit_golden(
            folder, lambda tensors: {name.replace("context_", "x"): own for name, own in tensors.items()}
        ),
        GOLDEN,
        "",
    ),
    "golden vectors too long": (
        lambda folder: edit_golden(folder, each("inputs/query", too_long)),
        GOLDEN,
        "which does not fit",
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
    assert_answers(healthy, submitted(engine, healthy.model, request_of(healthy.model, [(2, 3)])).result())
    engine.close()
    return failed


@pytest.mark.parametrize(("damage", "file", "says"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_artifact_affects_only_its_model_and_names_the_file(
    copies: Path,
    damage: Callable[[Path], object],
    file: str,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(copies / SELF / "1")
    failed = assert_only_one_failed(load_repository(copies, DEVICE))
    assert failed.reason.startswith(f"{file}: ")
    assert says in failed.reason
    assert str(copies) not in failed.reason
    (logged,) = [vars(record)["reason"] for record in caplog.records if record.levelname == "ERROR"]
    assert logged.startswith(f"{copies / SELF / '1' / file}: ")
    assert says in logged
    # What the runtime said is for the log only.
    assert ("ONNXRuntimeError" in logged) == (damage is empty_graph)
    assert "ONNXRuntimeError" not in failed.reason


def test_an_unexpected_error_names_no_path(copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: LoadedModel) -> LoadedModel:
        if model.name == SELF:
            raise TypeError(str(copies))
        return model

    monkeypatch.setattr(loading, "calibrated", fail)
    failed = assert_only_one_failed(load_repository(copies, DEVICE))
    assert failed.reason == "unexpected TypeError; the server's log has details"


@pytest.mark.parametrize("ceiling", [1e-5, 1e-6], ids=["met", "missed"])
def test_the_ceiling_of_tolerances_can_be_set(copies: Path, ceiling: float) -> None:
    found = load_repository(copies, DEVICE, max_tolerance=ceiling).find(SELF)
    assert isinstance(found, LoadedModel) == (ceiling == 1e-5)


def outside(copies: Path, name: str, part: str) -> None:
    """Replaces a part of an artifact with a link to the same part outside the repository."""
    path = copies / name / part
    elsewhere = copies.with_name(f"{copies.name}-elsewhere")
    elsewhere.mkdir()
    moved = path.rename(elsewhere / "moved")
    path.symlink_to(moved)


@pytest.mark.parametrize("part", ["", "1", f"1/{GRAPH}", f"1/{GOLDEN}", f"1/{MANIFEST}"])
def test_links_that_lead_out_of_the_repository_are_refused(copies: Path, part: str) -> None:
    outside(copies, SELF, part)
    failed = assert_only_one_failed(load_repository(copies, DEVICE))
    assert "lies outside the model repository" in failed.reason
    assert "elsewhere" not in failed.reason


def test_a_circle_of_links_is_refused(copies: Path) -> None:
    (copies / SELF / "1" / GRAPH).unlink()
    (copies / SELF / "1" / GRAPH).symlink_to(GRAPH)
    assert "cannot be read" in assert_only_one_failed(load_repository(copies, DEVICE)).reason


def test_links_within_the_repository_are_followed_as_kubernetes_makes_them(copies: Path) -> None:
    stamped = copies / "..2026_01_01"
    stamped.mkdir()
    (copies / "..data").symlink_to(stamped.name, target_is_directory=True)
    for name in (SELF, CROSS):
        (copies / name).rename(stamped / name)
        (copies / name).symlink_to(f"..data/{name}", target_is_directory=True)
    repository = load_repository(copies, DEVICE)
    assert [(model.name, isinstance(model, LoadedModel)) for model in repository] == [
        (CROSS, True),
        (SELF, True),
    ]


def test_the_repository_itself_may_be_a_link(copies: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("links") / "current"
    link.symlink_to(copies, target_is_directory=True)
    assert isinstance(load_repository(link, DEVICE).find(SELF), LoadedModel)


def test_weights_beside_the_graph_are_found_through_links(repository: Path, tmp_path: Path) -> None:
    name = "multi-head-768x12"
    shutil.copytree(repository / name, tmp_path / "..data" / name)
    folder = tmp_path / name / "1"
    folder.mkdir(parents=True)
    for path in (tmp_path / "..data" / name / "1").iterdir():
        (folder / path.name).symlink_to(path)
    assert isinstance(load_repository(tmp_path, DEVICE).find(name), LoadedModel)


def test_a_failed_model_is_not_ready_and_names_the_cause(copies: Path) -> None:
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
        ("c" * 5000, "", "model_name", f"model '{'c' * 128}...' does not exist; there are: a, b"),
        ("a", "3", "model_version", "model 'a' does not have version '3'; it has: 2, 10"),
        ("a", "02", "model_version", "model 'a' does not have version '02'; it has: 2, 10"),
    ],
    ids=["name", "no name", "long name", "version", "version in other writing"],
)
def test_an_unknown_model_is_refused_with_the_names_of_the_others(
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
