"""Changes of a repository: loaded beside what serves, made in one step, and refused without a trace.

A model that is taken out of service stays so, whatever change is prepared, until it is loaded again.
"""

import shutil
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from attention_serving.artifact.manifest import MANIFEST_FILE
from attention_serving.server import machine
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    ModelNotReadyError,
    UnsupportedError,
)
from attention_serving.server.engine.in_process import InProcessModel
from attention_serving.server.engine.limits import select_versions
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models import control as control_module
from attention_serving.server.engine.models import loading
from attention_serving.server.engine.models.control import (
    ChangeKind,
    IndexEntry,
    ModelControl,
    ModelState,
)
from attention_serving.server.engine.models.loading import HEADROOM_BYTES, HEADROOM_FACTOR, ModelStore
from attention_serving.server.engine.models.repository import FailedModel, Model, Repository
from attention_serving.server.engine.run.provider import Device, ProviderError
from attention_serving.server.engine.types import DecodedRequest, Result
from tests.server.samples import SELF, ragged
from tests.server.seams import PATIENCE_SECONDS, wait_until
from tests.support.coroutines import submitted

DEVICE = Device(threads=1)
REASON = "it differs"
LOADED, REPLACED, UNLOADED = ((SELF, kind, True) for kind in ChangeKind)
NOT_LOADED, NOT_REPLACED, _ = ((SELF, kind, False) for kind in ChangeKind)


@pytest.fixture
def folder(artifacts: Path, tmp_path: Path) -> Path:
    shutil.copytree(artifacts / SELF, tmp_path / "models" / SELF)
    return tmp_path / "models"


class Control(ModelControl):
    """Serves what a folder has; records its changes."""

    def __init__(self, folder: Path, policy: str = "all") -> None:
        store = ModelStore(folder, DEVICE, policy=policy)
        self.changes: list[None] = []
        self.reported: list[tuple[str, ChangeKind, bool]] = []
        models = Repository(store.load(*key) for key in store.artifacts())
        changed = lambda: self.changes.append(None)  # noqa: E731
        report = lambda *change: self.reported.append(change)  # noqa: E731
        super().__init__(store, models, changed, report, is_explicit=True)

    @property
    def states(self) -> list[str]:
        """State of each version; what is served is READY."""
        return [f"{entry.version} {entry.state}" for entry in self.index()]

    def refusal(self) -> str:
        """Why the model cannot be loaded."""
        with pytest.raises(ModelNotReadyError) as caught:
            self.load(SELF)
        return caught.value.message

    def poll_times(self, count: int) -> None:
        """Polls the folder several times."""
        for _ in range(count):
            self.poll_once()

    def withdraw_served(self) -> None:
        """Takes the version out of service that requests get which name none."""
        assert self.withdraw(self.repository.ready(SELF), REASON)


@pytest.fixture
def control(folder: Path) -> Iterator[Control]:
    control = Control(folder)
    yield control
    control.close()


def add_version(folder: Path, version: str, *, damaged: bool = False) -> Path:
    """Writes a version, and returns its manifest."""
    target = folder / SELF / version
    shutil.copytree(folder / SELF / "1", target)
    manifest = target / MANIFEST_FILE
    manifest.write_text(manifest.read_text().replace('"version": 1', f'"version": {version}'))
    if damaged:
        (target / "model.onnx").write_bytes(b"damaged")
    return manifest


def rewrite(folder: Path) -> None:
    """Writes the same artifact again, as a new export does."""
    manifest = folder / SELF / "1" / MANIFEST_FILE
    text = manifest.read_text()
    manifest.unlink()
    manifest.write_text(text + "\n")


def test_only_what_has_changed_is_loaded_replaced_or_unloaded(folder: Path, control: Control) -> None:
    old = control.repository.ready(SELF, "1")
    control.load(SELF)
    assert control.reported == []
    add_version(folder, "2")
    control.load(SELF)
    assert (control.repository.ready(SELF, "1"), control.states) == (old, ["1 READY", "2 READY"])
    rewrite(folder)
    control.load(SELF)
    assert control.repository.ready(SELF, "1") is not old
    assert not control.withdraw(old, REASON)
    assert control.states == ["1 READY", "2 READY"]
    shutil.rmtree(folder / SELF / "2")
    control.load(SELF)
    control.unload(SELF)
    assert control.reported == [LOADED, REPLACED, UNLOADED, UNLOADED]
    assert len(control.changes) == 5


def test_a_bad_version_changes_nothing_and_says_why(folder: Path) -> None:
    control = Control(folder, "latest")
    old = control.repository.ready(SELF)
    add_version(folder, "2", damaged=True)
    assert "version 2 failed to load: " in control.refusal()
    assert control.repository.ready(SELF) is old
    assert control.states == ["1 READY", "2 UNAVAILABLE"]
    assert "model.onnx" in control.index()[1].reason
    assert (control.changes, control.reported) == ([], [NOT_LOADED])


def test_polling_serves_the_good_versions_beside_a_bad_one(folder: Path, control: Control) -> None:
    old = control.repository.ready(SELF)
    add_version(folder, "2", damaged=True)
    add_version(folder, "3")
    (folder / SELF / "1" / "model.onnx").write_bytes(b"damaged")
    rewrite(folder)
    control.load(SELF, strict=False)
    assert control.repository.ready(SELF, "1") is old
    assert control.states == ["1 READY", "2 UNAVAILABLE", "3 READY"]
    assert control.reported == [NOT_REPLACED, NOT_LOADED, LOADED]
    latest = Control(folder, "latest")
    add_version(folder, "4", damaged=True)
    latest.load(SELF, strict=False)
    assert latest.states == ["3 READY", "4 UNAVAILABLE"]
    latest.withdraw_served()
    with pytest.raises(ModelNotReadyError, match="version 3 was taken out of service"):
        latest.repository.ready(SELF, "3")


def test_polling_waits_until_a_slow_copy_rests_and_tries_again_when_more_arrives(
    folder: Path, control: Control
) -> None:
    target = folder / SELF / "1"
    copied = target.rename(folder / "copied")
    control.poll_times(2)
    assert (control.reported, list(control.repository)) == ([UNLOADED], [])
    target.mkdir()
    first, *others, last = sorted(copied.iterdir(), key=lambda path: path.name == MANIFEST_FILE)
    for file in (*others, last):
        assert control.changed_on_disk() == {}  # an artifact without a manifest waits
        shutil.copy(file, target)
    control.poll_times(4)
    assert control.reported == [UNLOADED, NOT_LOADED]
    shutil.copy(first, target)
    control.poll_times(4)
    assert control.reported == [UNLOADED, NOT_LOADED, LOADED]
    shutil.rmtree(folder)
    control.poll_once()
    assert control.states == ["1 READY"]


def test_a_change_without_memory_is_refused(
    folder: Path, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for path in add_version(folder, "2").parent.iterdir())
    needed = HEADROOM_BYTES + HEADROOM_FACTOR * size
    monkeypatch.setattr(machine, "free_bytes", lambda: needed - 1)
    says = f"it needs about {needed} bytes of memory; {needed - 1} are free"
    assert control.refusal() == f"model {SELF!r} version 2 failed to load: {says}"
    assert control.states == ["1 READY", "2 UNAVAILABLE"]
    monkeypatch.setattr(machine, "free_bytes", lambda: needed)
    control.load(SELF)
    assert control.states == ["1 READY", "2 READY"]


def test_polling_tries_again_when_a_failure_may_have_passed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ever more seldom while nothing changes, and at once if files do."""

    def fail(_model: LoadedModel) -> LoadedModel:
        raise ProviderError("the device is in use")

    with monkeypatch.context() as patch:
        patch.setattr(loading, "calibrate", fail)
        control = Control(folder)
    monkeypatch.setattr(machine, "free_bytes", lambda: 0)
    attempts = []
    for _ in range(40):
        control.poll_once()
        attempts.append(len(control.reported))
    first = attempts.index(1)
    assert [attempts.index(count) - first for count in (2, 3, 4)] == [2, 6, 14]
    assert control.states == ["1 UNAVAILABLE"]
    monkeypatch.undo()
    before = len(control.reported)
    control.poll_times(control_module.MAX_POLLS)
    assert control.states == ["1 READY"]
    assert control.reported[before:] == [LOADED]
    add_version(folder, "2")
    monkeypatch.setattr(machine, "free_bytes", lambda: 0)
    control.poll_times(2)
    monkeypatch.undo()
    add_version(folder, "3")
    control.poll_times(2)
    assert control.states == ["1 READY", "2 READY", "3 READY"]
    control.close()


def ask(engine: Engine) -> "Future[Result]":
    query = ragged(np.random.default_rng(0), [3], 4)
    return submitted(engine, engine.repository.ready(SELF), DecodedRequest(inputs={"query": query}))


def test_a_model_that_is_unloaded_is_freed_and_can_be_loaded_again(folder: Path, control: Control) -> None:
    engine = Engine(control.repository)
    ask(engine).result(PATIENCE_SECONDS)
    model = weakref.ref(control.repository.ready(SELF))
    control.request(control.unload, SELF).result(PATIENCE_SECONDS)
    with pytest.raises(ModelNotFoundError):
        ask(engine)
    wait_until(lambda: model() is None)
    wait_until(lambda: control.index() == [IndexEntry(SELF, "1", ModelState.UNAVAILABLE, "unloaded")])
    with pytest.raises(ModelNotReadyError, match=f"model '{SELF}' is not loaded"):
        control.request(control.unload, SELF).result(PATIENCE_SECONDS)
    assert ModelStore(folder, DEVICE).remembered() == []
    control.request(control.load, SELF).result(PATIENCE_SECONDS)
    assert ModelStore(folder, DEVICE).remembered() == [SELF]
    ask(engine).result(PATIENCE_SECONDS)
    engine.close()


def test_a_withdrawn_model_is_refused_with_the_reason_until_it_is_loaded_again(
    folder: Path, control: Control
) -> None:
    control.withdraw_served()
    assert control.repository.find(SELF) == FailedModel(SELF, "1", REASON, is_withdrawn=True)
    message = f"model '{SELF}' version 1 was taken out of service: {REASON}"
    with pytest.raises(ModelNotReadyError, match=message) as caught:
        control.repository.ready(SELF)
    assert (caught.value.code, caught.value.reason) == ("FAILED_PRECONDITION", "MODEL_NOT_READY")
    assert control.index() == [IndexEntry(SELF, "1", ModelState.UNAVAILABLE, REASON)]
    assert len(control.changes) == 1
    assert list(control.changed_on_disk()) == []
    (folder / SELF / "1" / MANIFEST_FILE).touch()
    assert list(control.changed_on_disk()) == [SELF]
    control.load(SELF)
    assert control.states == ["1 READY"]


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


# Texts that are not names of models, though some lead to one.
NOT_NAMES = ["", "..", f"../outside/{SELF}", f"inner/{SELF}", f".{SELF}", f"{SELF}\n", "modèle", "a" * 5000]


@pytest.mark.parametrize("name", NOT_NAMES)
def test_what_is_not_a_name_is_refused_and_loads_nothing(name: str, folder: Path, control: Control) -> None:
    for copy in (f"inner/{SELF}", f".{SELF}", f"../outside/{SELF}"):
        shutil.copytree(folder / SELF, folder / copy)
    with pytest.raises(InvalidRequestError, match=r"^model_name: is '.*; must match \^") as refusal:
        control.request(control.load, name)
    with pytest.raises(ModelNotReadyError, match=r"does not exist in the repository$"):
        control.load(name)
    with pytest.raises(ModelNotFoundError, match="does not contain model") as absent:
        InProcessModel.load(folder, name)
    assert max(len(refusal.value.message), len(absent.value.message) - len(str(folder))) < 250
    assert control.states == ["1 READY"]
    control.is_explicit = False
    with pytest.raises(UnsupportedError, match="start the server with --model-control explicit"):
        control.request(control.load, SELF)


@pytest.mark.parametrize("version", ["../1", "01", "1" * 5000, "\u0661", "2"])
def test_what_is_not_a_version_of_the_model_is_refused(folder: Path, version: str) -> None:
    for name in ("01", "\u0661"):
        shutil.copytree(folder / SELF / "1", folder / SELF / name)
    assert ModelStore(folder, DEVICE).chosen(SELF) == ["1"]
    with pytest.raises(ModelNotFoundError, match=r"it has version 1$") as absent:
        InProcessModel.load(folder, SELF, version)
    assert len(absent.value.message) < 250 + len(str(folder))


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
    assert select_versions(policy, versions) == chosen


@pytest.mark.parametrize("text", ["", "newest", "latest:", "latest:0", "specific", "all:1"])
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be one of all, latest"):
        select_versions(text, ())
