"""Changes of a repository: loaded beside what serves, made in one step, and refused without a trace."""

import shutil
import time
import weakref
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from attention_serving.server import machine
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import ModelNotFoundError, ModelNotReadyError
from attention_serving.server.engine.limits import chosen_versions
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import (
    INCOMPLETE,
    IndexEntry,
    ModelState,
    RepositoryControl,
)
from attention_serving.server.engine.models.loading import (
    HEADROOM_BYTES,
    HEADROOM_FACTOR,
    ModelStore,
    RepositoryError,
)
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Request, Result
from tests.server.samples import SELF, ragged
from tests.server.seams import PATIENCE_SECONDS
from tests.support.coroutines import submitted

DEVICE = Device(threads=1)


@pytest.fixture
def folder(artifacts: Path, tmp_path: Path) -> Path:
    shutil.copytree(artifacts / SELF, tmp_path / SELF)
    return tmp_path


def control_of(folder: Path, policy: str = "all") -> RepositoryControl:
    store = ModelStore(folder, DEVICE, policy=policy)
    keys = [(name, version) for name in store.names() for version in store.chosen(name)]
    return RepositoryControl(store, Repository(store.load(*key) for key in keys))


def add_version(folder: Path, version: str, *, damaged: bool = False) -> None:
    """Writes a version whose manifest comes last, as an export does."""
    target = folder / SELF / version
    shutil.copytree(folder / SELF / "1", target, ignore=shutil.ignore_patterns("manifest.json"))
    manifest = (folder / SELF / "1" / "manifest.json").read_text()
    if damaged:
        (target / "model.onnx").write_bytes(b"damaged")
    (target / "manifest.json").write_text(manifest.replace('"version": 1', f'"version": {version}'))


def served(control: RepositoryControl) -> list[str]:
    models = control.repository.versions(SELF).values()
    return [model.version for model in models if isinstance(model, LoadedModel)]


def refusal(control: RepositoryControl) -> str:
    """Why the model cannot be loaded."""
    with pytest.raises(ModelNotReadyError) as caught:
        control.load(SELF)
    return caught.value.message


def test_a_new_version_takes_the_place_of_the_old_one(folder: Path) -> None:
    control = control_of(folder, "latest")
    add_version(folder, "2")
    control.load(SELF)
    assert control.repository.ready(SELF).version == "2"
    with pytest.raises(ModelNotFoundError, match="does not have version '1'; it has: 2"):
        control.repository.find(SELF, "1")


def test_a_version_that_has_not_changed_is_kept(folder: Path) -> None:
    control = control_of(folder)
    old = control.repository.ready(SELF, "1")
    add_version(folder, "2")
    control.load(SELF)
    assert control.repository.ready(SELF, "1") is old
    assert served(control) == ["1", "2"]


def test_a_bad_version_changes_nothing_and_says_why(folder: Path) -> None:
    control = control_of(folder, "latest")
    old = control.repository.ready(SELF)
    add_version(folder, "2", damaged=True)
    assert "version 2 failed to load: " in refusal(control)
    assert control.repository.ready(SELF) is old
    first, second = control.index()
    assert (first.version, first.state) == ("1", ModelState.READY)
    assert (second.version, second.state) == ("2", ModelState.UNAVAILABLE)
    assert "model.onnx" in second.reason


def test_polling_serves_the_good_versions_beside_a_bad_one(folder: Path) -> None:
    control = control_of(folder)
    add_version(folder, "2", damaged=True)
    add_version(folder, "3")
    control.load(SELF, strict=False)
    assert served(control) == ["1", "3"]
    assert [entry.state for entry in control.index()] == ["READY", "UNAVAILABLE", "READY"]


def test_polling_keeps_the_old_version_if_the_latest_is_bad(folder: Path) -> None:
    control = control_of(folder, "latest")
    add_version(folder, "2", damaged=True)
    control.load(SELF, strict=False)
    assert served(control) == ["1"]


def test_an_artifact_without_a_manifest_is_incomplete(folder: Path) -> None:
    control = control_of(folder)
    add_version(folder, "2")
    (folder / SELF / "2" / "manifest.json").unlink()
    assert list(control.changed_on_disk()) == []
    assert refusal(control).endswith(INCOMPLETE)


def test_an_incomplete_version_beside_a_new_one_is_not_loaded_again_and_again(folder: Path) -> None:
    control = control_of(folder)
    add_version(folder, "2")
    manifest = folder / SELF / "2" / "manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    add_version(folder, "3")
    assert list(control.changed_on_disk()) == [SELF]
    control.load(SELF, strict=False)
    assert (served(control), list(control.changed_on_disk())) == (["1", "3"], [])
    manifest.write_text(text)
    assert list(control.changed_on_disk()) == [SELF]
    control.load(SELF, strict=False)
    assert (served(control), list(control.changed_on_disk())) == (["1", "2", "3"], [])


def test_what_changed_on_disk_is_found_once(folder: Path) -> None:
    control = control_of(folder)
    assert list(control.changed_on_disk()) == []
    add_version(folder, "2", damaged=True)
    assert list(control.changed_on_disk()) == [SELF]
    control.load(SELF, strict=False)
    assert list(control.changed_on_disk()) == []
    shutil.rmtree(folder / SELF / "2")
    assert list(control.changed_on_disk()) == [SELF]
    control.load(SELF, strict=False)
    assert list(control.changed_on_disk()) == []
    shutil.rmtree(folder / SELF)
    assert list(control.changed_on_disk()) == [SELF]
    shutil.rmtree(folder)
    with pytest.raises(RepositoryError, match="does not exist"):
        control.changed_on_disk()


def test_the_index_lists_what_is_served_while_the_folder_is_away(folder: Path) -> None:
    control = control_of(folder)
    folder.rename(folder.with_name("moved"))
    assert control.index() == [IndexEntry(SELF, "1", ModelState.READY)]


def test_a_change_without_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = control_of(folder)
    add_version(folder, "2")
    size = sum(path.stat().st_size for path in (folder / SELF / "2").iterdir())
    needed = HEADROOM_BYTES + HEADROOM_FACTOR * size
    monkeypatch.setattr(machine, "free_bytes", lambda: needed - 1)
    says = f"it needs about {needed} bytes of memory; {needed - 1} are free"
    assert refusal(control) == f"model {SELF!r} version 2 failed to load: {says}"
    assert served(control) == ["1"]
    monkeypatch.setattr(machine, "free_bytes", lambda: needed)
    control.load(SELF)
    assert served(control) == ["1", "2"]


def ask(engine: Engine, length: int = 3) -> "Future[Result]":
    model = engine.model(SELF)
    query = ragged(np.random.default_rng(0), [length], 4)
    return submitted(engine, model, Request(inputs={"query": query}))


def test_a_model_that_is_unloaded_is_freed_and_can_be_loaded_again(folder: Path) -> None:
    control = control_of(folder)
    engine = Engine(control.repository)
    ask(engine).result(PATIENCE_SECONDS)
    model = weakref.ref(control.repository.ready(SELF))
    control.unload(SELF)
    with pytest.raises(ModelNotFoundError):
        ask(engine)
    until = time.monotonic() + PATIENCE_SECONDS
    while model() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert model() is None
    while control.index() != [IndexEntry(SELF, "1", ModelState.UNAVAILABLE, "unloaded")]:
        assert time.monotonic() < until
    with pytest.raises(ModelNotReadyError, match=f"model '{SELF}' is not loaded"):
        control.unload(SELF)
    control.load(SELF)
    ask(engine).result(PATIENCE_SECONDS)
    engine.close()


def test_an_unknown_model_is_refused(folder: Path) -> None:
    control = control_of(folder)
    with pytest.raises(ModelNotReadyError, match="model 'nonesuch' does not exist in the repository"):
        control.load("nonesuch")
    assert served(control) == ["1"]


@pytest.mark.parametrize(
    ("policy", "versions", "chosen"),
    [
        ("all", ["10", "9", "1"], ["1", "9", "10"]),
        ("latest", ["10", "9", "1"], ["10"]),
        ("latest:2", ["10", "9", "1"], ["9", "10"]),
        ("latest:5", ["1"], ["1"]),
        ("specific:9,3", ["10", "9", "1"], ["9"]),
    ],
)
def test_a_policy_chooses_versions(policy: str, versions: list[str], chosen: list[str]) -> None:
    assert chosen_versions(policy, versions) == chosen


@pytest.mark.parametrize(
    "text", ["", "newest", "latest:", "latest:0", "latest:x", "specific", "specific:", "all:1"]
)
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be one of all, latest"):
        chosen_versions(text, ())
