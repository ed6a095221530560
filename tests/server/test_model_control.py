"""Models that change on request and by polling: which names are taken, and when a change on disk is made."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from attention_serving.artifact.manifest import MANIFEST_FILE
from attention_serving.server.engine.errors import InvalidRequestError, ModelNotFoundError, ModelNotReadyError
from attention_serving.server.engine.in_process import InProcessModel
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import RepositoryControl
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.model_control import ControlMode, ModelControl
from tests.server.samples import SELF
from tests.server.seams import PATIENCE_SECONDS

OUTSIDE = f"../outside/{SELF}"
# Texts that are not names of models.
NOT_NAMES = {
    "empty": "",
    "path to another folder": OUTSIDE,
    "folder above": "..",
    "folder in a folder": f"inner/{SELF}",
    "hidden": f".{SELF}",
    "line break": f"{SELF}\n",
    "letter outside ASCII": "modèle",
    "too long for a file system": "a" * 5000,
}


@pytest.fixture
def folder(artifacts: Path, tmp_path: Path) -> Path:
    """A repository, with the same model in a folder of it, under a hidden name, and beside it."""
    for copy in (SELF, f"inner/{SELF}", f".{SELF}", OUTSIDE):
        shutil.copytree(artifacts / SELF, tmp_path / "repository" / copy)
    return tmp_path / "repository"


@pytest.fixture
def changes() -> list[bool]:
    """Whether each change that was tried was made."""
    return []


@pytest.fixture
def control(folder: Path, changes: list[bool]) -> RepositoryControl:
    store = ModelStore(folder, Device(threads=1))
    return RepositoryControl(store, Repository(), report=lambda change: changes.append(change.succeeded))


@pytest.fixture
def explicit(control: RepositoryControl) -> Iterator[ModelControl]:
    found = ModelControl(control, ControlMode.EXPLICIT)
    yield found
    found.close()


def served(control: RepositoryControl) -> list[tuple[str, str]]:
    return [(model.name, model.version) for model in control.repository if isinstance(model, LoadedModel)]


@pytest.mark.parametrize("name", [*NOT_NAMES.values(), "/absolute"], ids=[*NOT_NAMES, "absolute path"])
def test_what_is_not_a_name_is_refused_and_loads_nothing(
    name: str, folder: Path, control: RepositoryControl, explicit: ModelControl
) -> None:
    if name == "/absolute":
        name = str(folder.parent / "outside" / SELF)
    for change in (explicit.load, explicit.unload):
        with pytest.raises(InvalidRequestError, match=r"^model_name: is '.*; must match \^") as refusal:
            change(name)
        assert len(refusal.value.message) < 250
    with pytest.raises(ModelNotReadyError, match=r"does not exist in the repository$"):
        control.load(name)
    with pytest.raises(ModelNotFoundError, match="does not contain model") as absent:
        InProcessModel.load(folder, name)
    assert len(absent.value.message) < 250 + len(str(folder))
    assert served(control) == []


def test_a_name_is_loaded_and_unloaded(control: RepositoryControl, explicit: ModelControl) -> None:
    explicit.load(SELF).result(PATIENCE_SECONDS)
    assert served(control) == [(SELF, "1")]
    assert {entry.name for entry in explicit.index()} == {SELF}
    explicit.unload(SELF).result(PATIENCE_SECONDS)
    assert served(control) == []


@pytest.mark.parametrize("version", ["../1", "01", "1" * 5000, "\u0661", "2"])
def test_what_is_not_a_version_of_the_model_is_refused(folder: Path, version: str) -> None:
    for name in ("01", "\u0661"):
        shutil.copytree(folder / SELF / "1", folder / SELF / name)
    assert ModelStore(folder, Device()).chosen(SELF) == ["1"]
    with pytest.raises(ModelNotFoundError, match=r"it has version 1$") as absent:
        InProcessModel.load(folder, SELF, version)
    assert len(absent.value.message) < 250 + len(str(folder))


def test_polling_waits_until_a_slow_copy_rests_and_tries_again_when_more_arrives(
    folder: Path, changes: list[bool], control: RepositoryControl
) -> None:
    polling = ModelControl(control, ControlMode.POLL)
    copied = (folder / SELF / "1").rename(folder.parent / "copied")
    target = folder / SELF / "1"
    target.mkdir()
    manifest_first = sorted(copied.iterdir(), key=lambda path: path.name != MANIFEST_FILE)
    for file in manifest_first[:-1]:
        shutil.copy(file, target)
        polling._look()
    assert changes == []
    for _ in range(3):
        polling._look()
    assert changes == [False]
    shutil.copy(manifest_first[-1], target)
    for _ in range(3):
        polling._look()
    assert (changes, served(control)) == ([False, True], [(SELF, "1")])
    polling.close()
