"""What counts as loaded, replaced and unloaded, and what as failed."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from attention_serving.server.engine.errors import ModelNotReadyError
from attention_serving.server.engine.models.control import (
    ChangeKind,
    ModelChange,
    RepositoryControl,
)
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.provider import Device
from tests.server.engine.models.test_control import add_version
from tests.server.samples import SELF

LOADED = ModelChange(SELF, ChangeKind.LOAD, succeeded=True)
REPLACED = ModelChange(SELF, ChangeKind.REPLACE, succeeded=True)
UNLOADED = ModelChange(SELF, ChangeKind.UNLOAD, succeeded=True)
NOT_LOADED = ModelChange(SELF, ChangeKind.LOAD, succeeded=False)
NOT_REPLACED = ModelChange(SELF, ChangeKind.REPLACE, succeeded=False)


@pytest.fixture
def folder(artifacts: Path, tmp_path: Path) -> Path:
    shutil.copytree(artifacts / SELF, tmp_path / SELF)
    return tmp_path


class Changes:
    """A control that serves version 1 of a model, and the changes that it reports."""

    def __init__(self, folder: Path) -> None:
        store = ModelStore(folder, Device(threads=1))
        self.reported: list[ModelChange] = []
        models = Repository([store.load(SELF, "1")])
        self._control = RepositoryControl(store, models, report=self.reported.append)

    def load(self, *, strict: bool = True) -> list[ModelChange]:
        """Loads the model, and returns what that reported."""
        with suppress(ModelNotReadyError):
            self._control.load(SELF, strict=strict)
        return self._take()

    def unload(self) -> list[ModelChange]:
        self._control.unload(SELF)
        return self._take()

    def _take(self) -> list[ModelChange]:
        reported, self.reported[:] = list(self.reported), []
        return reported


def rewrite(folder: Path) -> None:
    """Writes the same artifact again, as a new export does."""
    manifest = folder / SELF / "1" / "manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    manifest.write_text(text + "\n")


def damage(folder: Path) -> None:
    (folder / SELF / "1" / "model.onnx").write_bytes(b"damaged")
    rewrite(folder)


def test_what_stays_is_not_counted(folder: Path) -> None:
    assert Changes(folder).load() == []


def test_a_further_version_is_loaded_and_a_rewritten_one_replaced(folder: Path) -> None:
    changes = Changes(folder)
    add_version(folder, "2")
    assert changes.load() == [LOADED]
    rewrite(folder)
    assert changes.load() == [REPLACED]


def test_a_removed_version_is_unloaded(folder: Path) -> None:
    changes = Changes(folder)
    add_version(folder, "2")
    changes.load()
    shutil.rmtree(folder / SELF / "2")
    assert changes.load() == [UNLOADED]
    assert changes.unload() == [UNLOADED]


@pytest.mark.parametrize("strict", [True, False], ids=["all or nothing", "the good ones"])
def test_versions_that_fail_are_counted_once(folder: Path, strict: bool) -> None:
    changes = Changes(folder)
    add_version(folder, "2", damaged=True)
    assert changes.load(strict=strict) == [NOT_LOADED]


def test_a_served_version_that_cannot_be_replaced_has_failed_to_be_replaced(folder: Path) -> None:
    changes = Changes(folder)
    damage(folder)
    assert changes.load(strict=False) == [NOT_REPLACED]
