"""Changes of a repository: loaded beside what serves, made in one step, and refused without a trace.

A model that is taken out of service stays so, whatever change is prepared, until it is loaded again.
"""

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
    ChangeKind,
    IndexEntry,
    ModelChange,
    ModelState,
    RepositoryControl,
)
from attention_serving.server.engine.models.loading import (
    HEADROOM_BYTES,
    HEADROOM_FACTOR,
    ModelStore,
    RepositoryError,
)
from attention_serving.server.engine.models.repository import FailedModel, Model, Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Request, Result
from tests.server.samples import SELF, ragged
from tests.server.seams import PATIENCE_SECONDS
from tests.support.coroutines import submitted

DEVICE = Device(threads=1)
REASON = "it differs"
LOADED, REPLACED, UNLOADED = (ModelChange(SELF, kind, succeeded=True) for kind in ChangeKind)
NOT_LOADED, NOT_REPLACED, _ = (ModelChange(SELF, kind, succeeded=False) for kind in ChangeKind)


@pytest.fixture
def folder(artifacts: Path, tmp_path: Path) -> Path:
    shutil.copytree(artifacts / SELF, tmp_path / SELF)
    return tmp_path


class Control(RepositoryControl):
    """Serves what a folder has; records its changes."""

    def __init__(self, folder: Path, policy: str = "all") -> None:
        store = ModelStore(folder, DEVICE, policy=policy)
        models = Repository(store.load(*key) for key in store.artifacts(store.names()))
        self.changes = 0
        self.reported: list[ModelChange] = []
        super().__init__(store, models, self._count, self.reported.append)

    def _count(self) -> None:
        self.changes += 1

    @property
    def served(self) -> list[str]:
        models = self.repository.versions(SELF).values()
        return [model.version for model in models if isinstance(model, LoadedModel)]

    @property
    def states(self) -> list[str]:
        return [f"{entry.version} {entry.state}" for entry in self.index()]

    def refusal(self) -> str:
        """Why the model cannot be loaded."""
        with pytest.raises(ModelNotReadyError) as caught:
            self.load(SELF)
        return caught.value.message

    def withdraw_served(self) -> LoadedModel:
        """Takes the version out of service that requests get which name none."""
        model = self.repository.ready(SELF)
        assert self.withdraw(model, REASON)
        return model


@pytest.fixture
def control(folder: Path) -> Control:
    return Control(folder)


def add_version(folder: Path, version: str, *, damaged: bool = False) -> None:
    """Writes a version whose manifest comes last, as an export does."""
    target = folder / SELF / version
    shutil.copytree(folder / SELF / "1", target, ignore=shutil.ignore_patterns("manifest.json"))
    manifest = (folder / SELF / "1" / "manifest.json").read_text()
    if damaged:
        (target / "model.onnx").write_bytes(b"damaged")
    (target / "manifest.json").write_text(manifest.replace('"version": 1', f'"version": {version}'))


def rewrite(folder: Path) -> None:
    """Writes the same artifact again, as a new export does."""
    manifest = folder / SELF / "1" / "manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    manifest.write_text(text + "\n")


def test_a_new_version_takes_the_place_of_the_old_one(folder: Path) -> None:
    control = Control(folder, "latest")
    add_version(folder, "2")
    control.load(SELF)
    assert control.repository.ready(SELF).version == "2"
    with pytest.raises(ModelNotFoundError, match="does not have version '1'; it has: 2"):
        control.repository.find(SELF, "1")
    assert sorted(control.reported) == [LOADED, UNLOADED]


def test_only_what_has_changed_is_loaded_replaced_or_unloaded(folder: Path, control: Control) -> None:
    old = control.repository.ready(SELF, "1")
    control.load(SELF)
    assert control.reported == []
    add_version(folder, "2")
    control.load(SELF)
    assert (control.repository.ready(SELF, "1"), control.served) == (old, ["1", "2"])
    assert control.reported == [LOADED]
    rewrite(folder)
    control.load(SELF)
    assert control.repository.ready(SELF, "1") is not old
    assert control.reported == [LOADED, REPLACED]
    shutil.rmtree(folder / SELF / "2")
    control.load(SELF)
    control.unload(SELF)
    assert control.reported == [LOADED, REPLACED, UNLOADED, UNLOADED]


def test_a_bad_version_changes_nothing_and_says_why(folder: Path) -> None:
    control = Control(folder, "latest")
    old = control.repository.ready(SELF)
    add_version(folder, "2", damaged=True)
    assert "version 2 failed to load: " in control.refusal()
    assert control.repository.ready(SELF) is old
    assert control.states == ["1 READY", "2 UNAVAILABLE"]
    assert "model.onnx" in control.index()[1].reason
    assert (control.changes, control.reported) == (0, [NOT_LOADED])


def test_polling_serves_the_good_versions_beside_a_bad_one(folder: Path, control: Control) -> None:
    add_version(folder, "2", damaged=True)
    add_version(folder, "3")
    control.load(SELF, strict=False)
    assert control.states == ["1 READY", "2 UNAVAILABLE", "3 READY"]
    assert control.reported == [NOT_LOADED, LOADED]
    latest = Control(folder, "latest")
    add_version(folder, "4", damaged=True)
    latest.load(SELF, strict=False)
    assert latest.served == ["3"]
    assert latest.withdraw_served().version == "3"
    with pytest.raises(ModelNotReadyError, match="version 3 was taken out of service"):
        latest.repository.ready(SELF, "3")


def test_polling_keeps_a_version_whose_replacement_is_bad(folder: Path, control: Control) -> None:
    old = control.repository.ready(SELF)
    (folder / SELF / "1" / "model.onnx").write_bytes(b"damaged")
    rewrite(folder)
    control.load(SELF, strict=False)
    assert control.repository.ready(SELF) is old
    assert control.reported == [NOT_REPLACED]


def test_an_incomplete_version_beside_a_new_one_is_not_loaded_again_and_again(
    folder: Path, control: Control
) -> None:
    add_version(folder, "2")
    manifest = folder / SELF / "2" / "manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    assert list(control.changed_on_disk()) == []
    assert control.refusal().endswith(INCOMPLETE)
    add_version(folder, "3")
    assert list(control.changed_on_disk()) == [SELF]
    control.load(SELF, strict=False)
    assert (control.served, list(control.changed_on_disk())) == (["1", "3"], [])
    manifest.write_text(text)
    assert list(control.changed_on_disk()) == [SELF]
    control.load(SELF, strict=False)
    assert (control.served, list(control.changed_on_disk())) == (["1", "2", "3"], [])


def test_what_changed_on_disk_is_found_once(folder: Path, control: Control) -> None:
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


def test_the_index_lists_what_is_served_while_the_folder_is_away(folder: Path, control: Control) -> None:
    folder.rename(folder.with_name("moved"))
    assert control.index() == [IndexEntry(SELF, "1", ModelState.READY)]


def test_a_change_without_memory_is_refused(
    folder: Path, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_version(folder, "2")
    size = sum(path.stat().st_size for path in (folder / SELF / "2").iterdir())
    needed = HEADROOM_BYTES + HEADROOM_FACTOR * size
    monkeypatch.setattr(machine, "free_bytes", lambda: needed - 1)
    says = f"it needs about {needed} bytes of memory; {needed - 1} are free"
    assert control.refusal() == f"model {SELF!r} version 2 failed to load: {says}"
    assert control.served == ["1"]
    monkeypatch.setattr(machine, "free_bytes", lambda: needed)
    control.load(SELF)
    assert control.served == ["1", "2"]


def ask(engine: Engine, length: int = 3) -> "Future[Result]":
    model = engine.model(SELF)
    query = ragged(np.random.default_rng(0), [length], 4)
    return submitted(engine, model, Request(inputs={"query": query}))


def test_a_model_that_is_unloaded_is_freed_and_can_be_loaded_again(control: Control) -> None:
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


OUT = IndexEntry(SELF, "1", ModelState.UNAVAILABLE, REASON)


def test_a_withdrawn_model_is_refused_with_the_reason_until_it_is_loaded_again(
    folder: Path, control: Control
) -> None:
    control.withdraw_served()
    assert control.repository.find(SELF) == FailedModel(SELF, "1", REASON, is_withdrawn=True)
    message = f"model '{SELF}' version 1 was taken out of service: {REASON}"
    with pytest.raises(ModelNotReadyError, match=message) as caught:
        control.repository.ready(SELF)
    assert (caught.value.code, caught.value.reason) == ("FAILED_PRECONDITION", "MODEL_NOT_READY")
    assert (control.index(), control.changes) == ([OUT], 1)
    assert list(control.changed_on_disk()) == []
    (folder / SELF / "1" / "manifest.json").touch()
    assert list(control.changed_on_disk()) == [SELF]
    control.load(SELF)
    assert control.states == ["1 READY"]
    with pytest.raises(ModelNotReadyError, match="model 'nonesuch' does not exist in the repository"):
        control.load("nonesuch")


def test_a_model_that_was_replaced_before_is_not_withdrawn(folder: Path, control: Control) -> None:
    old = control.repository.ready(SELF)
    rewrite(folder)
    control.load(SELF)
    assert not control.withdraw(old, REASON)
    assert (control.served, control.changes) == (["1"], 1)


def test_a_change_that_is_being_made_does_not_put_a_withdrawn_model_back(
    folder: Path, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_version(folder, "2")
    load = ModelStore.load

    def withdrawn_meanwhile(store: ModelStore, name: str, version: str) -> Model:
        control.withdraw_served()
        return load(store, name, version)

    monkeypatch.setattr(ModelStore, "load", withdrawn_meanwhile)
    control.load(SELF)
    assert control.states == ["1 UNAVAILABLE", "2 READY"]
    assert control.repository.find(SELF, "1") == FailedModel(SELF, "1", REASON, is_withdrawn=True)


def test_the_reason_of_an_earlier_failure_does_not_hide_that_of_the_withdrawal(
    folder: Path, control: Control
) -> None:
    manifest = folder / SELF / "1" / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text("{}")
    assert "failed to load" in control.refusal()
    manifest.write_text(whole)
    control.withdraw_served()
    assert control.index() == [OUT]


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


@pytest.mark.parametrize("text", ["", "newest", "latest:", "latest:0", "specific", "all:1"])
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be one of all, latest"):
        chosen_versions(text, ())
