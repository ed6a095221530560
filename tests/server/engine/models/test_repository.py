"""Models of a repository; a damaged artifact, or one that is not signed, affects only its own model."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.external_data_helper import set_external_data
from safetensors.numpy import load_file, save_file

from attention_serving.artifact.certificate import CERTIFICATE_FILE
from attention_serving.artifact.errors import ArtifactError
from attention_serving.export.certificate import sign_artifact
from attention_serving.server.engine.errors import ModelNotFoundError, ModelNotReadyError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models import loading
from attention_serving.server.engine.models.control import ModelControl
from attention_serving.server.engine.models.loading import ModelStore, load_model
from attention_serving.server.engine.models.repository import FailedModel, Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.run.session import RunControl, Session
from attention_serving.server.engine.types import Array
from attention_serving.server.errors import ServerError
from tests.server.samples import CROSS, SELF, load_repository
from tests.support.artifacts import edit_json, vouch
from tests.support.keys import new_key

DEVICE = Device(threads=1)
MANIFEST, GOLDEN, GRAPH = "manifest.json", "golden.safetensors", "model.lengths.onnx"


def change_byte(folder: Path) -> None:
    content = bytearray((folder / GRAPH).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / GRAPH).write_bytes(content)


def empty_graph(folder: Path) -> None:
    (folder / GRAPH).write_bytes(b"")
    vouch(folder, GRAPH)


def golden(edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        save_file(edit(load_file(folder / GOLDEN)), folder / GOLDEN)
        vouch(folder, GOLDEN)

    return damage


def miss_tolerance(tensors: dict[str, Any]) -> dict[str, Any]:
    name = next(name for name in tensors if name.startswith("mask/") and name.endswith("context_vectors"))
    moved = tensors[name].copy()
    moved.flat[-1] += np.float32(1e-3)
    return {**tensors, name: moved}


def external_data(location: str) -> Callable[[Path], None]:
    """Lets a graph take the bytes of its first tensor from another file, which exists beside it."""

    def damage(folder: Path) -> None:
        graph = onnx.load(folder / GRAPH)
        tensor = graph.graph.initializer[0]
        (folder / "secret.bin").write_bytes(tensor.raw_data)
        set_external_data(tensor, location)
        tensor.ClearField("raw_data")
        (folder / GRAPH).write_bytes(graph.SerializeToString())
        vouch(folder, GRAPH)

    return damage


def manifest(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / MANIFEST, edit)


LOADS_NOT = "the fp32 graph does not load on cpu"
UNLISTED = "names external data that the manifest does not list: "
DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "another version": (manifest(lambda c: c.update(version=2)), MANIFEST, f"describes {SELF}/2, and the"),
    "another name": (manifest(lambda c: c.update(name="x")), MANIFEST, "the manifest describes x/1, and"),
    "no plain graph": (manifest(lambda c: c["graphs"].pop("plain")), MANIFEST, "graph plain is missing"),
    "high tolerance": (manifest(lambda c: c["tolerance"].update(atol=0.11)), MANIFEST, "at most 0.1"),
    "empty graph": (empty_graph, GRAPH, LOADS_NOT),
    "weights not listed": (external_data("secret.bin"), GRAPH, f"{UNLISTED}'secret.bin'"),
    "weights in memory": (external_data("*/_ORT_MEM_ADDR_/*"), GRAPH, f"{UNLISTED}'*/_ORT_MEM_ADDR_/*'"),
    "another type": (
        manifest(lambda c: c["graphs"]["lengths"]["outputs"][0].update(data_type="int64")),
        GRAPH,
        "context_vectors is tensor(float); the manifest states int64",
    ),
    "tokenizer missing": (manifest(lambda c: c.update(tokenizer=GOLDEN)), GOLDEN, "the tokenizer does not"),
}  # fmt: skip

Tensors = dict[str, Any]


def each(part: str, change: Callable[[Any], Any]) -> Callable[[Tensors], Tensors]:
    """Changes every golden tensor whose name contains a part."""
    return lambda tensors: {name: change(array) if part in name else array for name, array in tensors.items()}


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: array for name, array in tensors.items() if part not in name}


NONE_OF_PLAIN = "contains no golden vectors for output context_vectors of graph plain"
GOLDEN_DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missed": (miss_tolerance, "context_vectors of graph mask differs from eager PyTorch by 0.001"),
    "none": (lambda _: {}, "contains no golden vectors"),
    "empty outputs": (each("/outputs/", lambda array: array[:0]), NONE_OF_PLAIN),
    "outputs that are NaN": (each("/outputs/", lambda array: np.full_like(array, np.nan)), NONE_OF_PLAIN),
    "no weights": (without("attention_weights"), "for output attention_weights of graph weights"),
    "no lengths": (without("key_lengths"), "takes key_lengths, query; a case of it contains query"),
    "one graph only": (
        lambda own: {name: array for name, array in own.items() if name.startswith("plain/")},
        "no golden vectors",
    ),
    "another width": (each("inputs/query", lambda array: array[..., :3].copy()), "which does not fit"),
}  # fmt: skip


@pytest.fixture
def copies(artifacts: Path, tmp_path: Path) -> Path:
    """A repository of two models, free to be damaged."""
    for name in (SELF, CROSS):
        shutil.copytree(artifacts / name, tmp_path / "models" / name)
    return tmp_path / "models"


ALL_DAMAGES = DAMAGES | {name: (golden(edit), GOLDEN, says) for name, (edit, says) in GOLDEN_DAMAGES.items()}


@pytest.mark.parametrize(("damage", "file", "says"), ALL_DAMAGES.values(), ids=ALL_DAMAGES)
def test_a_damaged_artifact_is_refused_by_its_file(
    copies: Path, damage: Callable[[Path], object], file: str, says: str
) -> None:
    folder = copies / SELF / "1"
    damage(folder)
    with pytest.raises(ArtifactError) as caught:
        load_model(folder, DEVICE)
    assert caught.value.reason.startswith(f"{file}: ")
    assert says in caught.value.reason
    assert str(copies) not in caught.value.reason
    # What the runtime said is for the log only.
    assert ("ONNXRuntimeError" in str(caught.value)) == (says == LOADS_NOT)
    assert "ONNXRuntimeError" not in caught.value.reason


class WrongOnAllThreads(Session):
    """A session whose outputs are wrong if a run has several threads."""

    def __init__(self, path: Path, device: Device, *, prepack_weights: bool = True) -> None:
        super().__init__(path, device, prepack_weights=prepack_weights)
        self._error = 0.0 if device.threads == 1 else 0.001

    def run(self, inputs: dict[str, Array], control: RunControl | None = None) -> dict[str, Array]:
        return {name: output + self._error for name, output in super().run(inputs, control).items()}


def test_runs_on_all_threads_are_proven_too(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "Session", WrongOnAllThreads)
    with pytest.raises(ArtifactError, match=r"differs from eager PyTorch by 0\.001"):
        load_model(artifacts / SELF / "1", Device(threads=2))


def only_failure(copies: Path) -> str:
    """Why the one model cannot be served, while the other is."""
    repository = load_repository(copies, DEVICE)
    with pytest.raises(ModelNotReadyError, match=rf"'{SELF}' version 1 failed to load: ") as caught:
        repository.ready(SELF)
    assert isinstance(repository.find(CROSS), LoadedModel)
    return caught.value.message


def test_a_damaged_artifact_affects_only_its_model(copies: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_byte(copies / SELF / "1")
    assert f"{GRAPH}: SHA-256 is" in only_failure(copies)
    (logged,) = [vars(record)["reason"] for record in caplog.records if record.levelname == "ERROR"]
    assert logged.startswith(f"{copies / SELF / '1' / GRAPH}: ")


def test_an_unexpected_error_names_no_path(copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: LoadedModel) -> LoadedModel:
        if model.name == SELF:
            raise TypeError(str(copies))
        return model

    monkeypatch.setattr(loading, "calibrate", fail)
    assert only_failure(copies).endswith("unexpected TypeError; the server's log has details")


@pytest.mark.parametrize("part", ["", f"1/{GRAPH}", f"1/{MANIFEST}"], ids=["model", "graph", "manifest"])
def test_links_that_lead_out_of_the_repository_are_refused(copies: Path, part: str) -> None:
    elsewhere = copies.with_name(f"{copies.name}-elsewhere")
    elsewhere.mkdir()
    moved = (copies / SELF / part).rename(elsewhere / "moved")
    (copies / SELF / part).symlink_to(moved)
    with pytest.raises(ArtifactError, match="lies outside the model repository") as caught:
        load_model(copies / SELF / "1", DEVICE)
    assert "elsewhere" not in caught.value.reason


def test_links_within_the_repository_are_followed_as_kubernetes_makes_them(
    copies: Path, tmp_path: Path
) -> None:
    """The repository itself may be a link too."""
    stamped = copies / "..2026_01_01"
    stamped.mkdir()
    (copies / "..data").symlink_to(stamped.name, target_is_directory=True)
    for name in (SELF, CROSS):
        (copies / name).rename(stamped / name)
        (copies / name).symlink_to(f"..data/{name}", target_is_directory=True)
    link = tmp_path / "current"
    link.symlink_to(copies, target_is_directory=True)
    repository = load_repository(link, DEVICE)
    assert [(each.name, type(each)) for each in repository] == [(CROSS, LoadedModel), (SELF, LoadedModel)]


@pytest.mark.parametrize(
    ("name", "version", "field", "message"),
    [
        ("c", "", "model_name", "model 'c' does not exist; there are: a, b"),
        ("c" * 5000, "", "model_name", f"model '{'c' * 128}...' does not exist; there are: a, b"),
        ("a", "3", "model_version", "model 'a' does not have version '3'; it has: 2, 10"),
        ("a", "02", "model_version", "model 'a' does not have version '02'; it has: 2, 10"),
    ],
    ids=["name", "long name", "version", "version in other writing"],
)
def test_models_are_found_by_name_and_version_or_refused_with_those_that_there_are(
    name: str, version: str, field: str, message: str
) -> None:
    keys = ("b", "1"), ("a", "10"), ("a", "2")  # models need not load to be found
    repository = Repository(FailedModel(*key, "") for key in keys)
    assert [(each.name, each.version) for each in repository] == [("a", "2"), ("a", "10"), ("b", "1")]
    assert (repository.find("a").version, repository.find("a", "2").version) == ("10", "2")
    with pytest.raises(ModelNotFoundError) as caught:
        repository.find(name, version)
    assert (caught.value.field, caught.value.message) == (field, message)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("org/a", "a"),
        ("org/b", "b"),  # the setting takes precedence over the manifest of a
        ("b", "b"),  # and a model's own name over both
        ("org/later", "later"),
        ("org/both", "org/both"),
        ("org/none", "org/none"),
    ],
)
def test_an_alias_leads_to_one_model(name: str, model: str) -> None:
    models = [
        FailedModel("a", "1", "", aliases=("org/a", "org/both", "org/b", "b")),
        FailedModel("b", "1", "", aliases=("org/both",)),
    ]
    repository = Repository(models, {"org/b": "b", "b": "a", "org/later": "later"})
    assert repository.resolve(name) == model
    assert repository.aliases("b") == ["org/b"]
    if model in ("a", "b"):
        assert repository.find(name).name == model
        return
    problem = "is an alias of several models" if name == "org/both" else "does not exist; there are: a, b"
    with pytest.raises(ModelNotFoundError, match=f"model '{name}' {problem}"):
        repository.find(name)


def test_a_repository_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="does not exist or is not a folder"):
        load_repository(tmp_path / "absent", DEVICE)
    with pytest.raises(ServerError, match=r"cannot be read by user \d+: File name too long"):
        load_repository(tmp_path / ("x" * 300), DEVICE)
    for folder in ("one", "0", "01", ".1.tmp"):
        (tmp_path / "name" / folder).mkdir(parents=True)
    with pytest.raises(ServerError, match="does not contain a <name>/<version>/ folder"):
        load_repository(tmp_path, DEVICE)


KEY, OTHER = new_key(), new_key()
KEYS = (OTHER.public_key, KEY.public_key)


@pytest.fixture
def signed(copies: Path) -> Path:
    """A repository of two artifacts, one of which is signed."""
    sign_artifact(copies / SELF / "1", KEY)
    return copies


def test_what_was_not_signed_is_refused_before_it_reaches_the_runtime(
    signed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    monkeypatch.setattr(loading, "Session", lambda *given, **_: opened.append(given))
    sign_artifact(signed / SELF / "1", new_key())
    failures = [ModelStore(signed, DEVICE, proof_keys=KEYS).load(name, "1") for name in (CROSS, SELF)]
    for failure, says in zip(
        failures, ("is missing: the artifact", "is not signed with a trusted key"), strict=True
    ):
        assert isinstance(failure, FailedModel)
        assert failure.reason.startswith(f"{CERTIFICATE_FILE}: {says}")
    assert opened == []


def test_polling_takes_an_artifact_once_it_is_signed(signed: Path) -> None:
    store = ModelStore(signed, DEVICE, proof_keys=KEYS)
    control = ModelControl(store, Repository(store.load(name, "1") for name in (SELF, CROSS)))
    kept = control.repository.ready(SELF)
    assert list(control.changed_on_disk()) == []
    sign_artifact(signed / CROSS / "1", OTHER)
    assert list(control.changed_on_disk()) == [CROSS]
    control.load(CROSS, strict=False)
    assert control.repository.ready(CROSS).version == "1"
    assert control.repository.ready(SELF) is kept
    assert list(control.changed_on_disk()) == []
