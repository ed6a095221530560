"""A model that is taken out of service: whatever change is prepared, and until it is loaded again."""

import shutil
from pathlib import Path

import pytest

from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import ModelNotReadyError
from attention_serving.server.engine.models.control import IndexEntry, ModelState, RepositoryControl
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import FailedModel, Model, Repository
from tests.server.damage import DEVICE
from tests.server.engine.models.test_control import add_version
from tests.server.samples import CROSS, SELF, assert_answers, request_of, validated_of
from tests.support.coroutines import submitted

REASON = "it differs"
OUT = IndexEntry(SELF, "1", ModelState.UNAVAILABLE, REASON)


@pytest.fixture
def folder(artifacts: Path, tmp_path: Path) -> Path:
    for name in (SELF, CROSS):
        shutil.copytree(artifacts / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def changes() -> list[int]:
    return []


@pytest.fixture
def control(folder: Path, changes: list[int]) -> RepositoryControl:
    store = ModelStore(folder, DEVICE)
    repository = Repository(store.load(name, "1") for name in (SELF, CROSS))
    return RepositoryControl(store, repository, lambda: changes.append(1))


def test_a_withdrawn_model_is_refused_with_the_reason_and_shown_as_unavailable(
    control: RepositoryControl, changes: list[int]
) -> None:
    model = control.repository.ready(SELF)
    assert control.withdraw(model, REASON)
    assert control.repository.find(SELF) == FailedModel(SELF, "1", REASON, is_withdrawn=True)
    message = f"model '{SELF}' version 1 was taken out of service: {REASON}"
    with pytest.raises(ModelNotReadyError, match=message) as caught:
        control.repository.ready(SELF)
    assert (caught.value.code, caught.value.reason) == ("FAILED_PRECONDITION", "MODEL_NOT_READY")
    assert control.index() == [IndexEntry(CROSS, "1", ModelState.READY), OUT]
    assert changes == [1]
    assert list(control.changed_on_disk()) == []


def test_a_request_that_has_found_its_model_is_answered(control: RepositoryControl) -> None:
    engine = Engine(control.repository)
    request = validated_of(engine.model(SELF), [(3, 3)])
    assert control.withdraw(request.model, REASON)
    result = submitted(engine, request.model, request_of(request.model, [(3, 3)])).result()
    assert_answers(request, result)
    engine.close()


def test_a_model_that_was_replaced_before_is_not_withdrawn(
    control: RepositoryControl, folder: Path, changes: list[int]
) -> None:
    old = control.repository.ready(SELF)
    manifest = folder / SELF / "1" / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    control.load(SELF)
    new = control.repository.ready(SELF)
    assert new is not old
    assert not control.withdraw(old, REASON)
    assert control.repository.ready(SELF) is new
    assert changes == [1]


def test_a_change_that_is_being_made_does_not_put_a_withdrawn_model_back(
    control: RepositoryControl, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_version(folder, "2")
    load = ModelStore.load

    def withdrawn_meanwhile(store: ModelStore, name: str, version: str) -> Model:
        assert control.withdraw(control.repository.ready(SELF, "1"), REASON)
        return load(store, name, version)

    monkeypatch.setattr(ModelStore, "load", withdrawn_meanwhile)
    control.load(SELF)
    states = {(entry.version, entry.state) for entry in control.index() if entry.name == SELF}
    assert states == {("1", ModelState.UNAVAILABLE), ("2", ModelState.READY)}
    assert control.repository.find(SELF, "1") == FailedModel(SELF, "1", REASON, is_withdrawn=True)


def test_loading_it_again_brings_it_back(control: RepositoryControl) -> None:
    control.withdraw(control.repository.ready(SELF), REASON)
    control.load(SELF)
    assert control.repository.ready(SELF).version == "1"
    assert control.index() == [IndexEntry(name, "1", ModelState.READY) for name in (CROSS, SELF)]


def test_it_is_loaded_again_when_its_artifact_is_written_again(
    control: RepositoryControl, folder: Path
) -> None:
    control.withdraw(control.repository.ready(SELF), REASON)
    (folder / SELF / "1" / "manifest.json").touch()
    assert list(control.changed_on_disk()) == [SELF]
    control.load(SELF, strict=False)
    assert control.repository.ready(SELF).version == "1"


def test_another_version_answers_requests_that_name_none(control: RepositoryControl, folder: Path) -> None:
    add_version(folder, "2")
    control.load(SELF)
    assert control.repository.ready(SELF).version == "2"
    control.withdraw(control.repository.ready(SELF), REASON)
    assert control.repository.ready(SELF).version == "1"
    with pytest.raises(ModelNotReadyError, match="version 2 was taken out of service"):
        control.repository.ready(SELF, "2")


def test_the_reason_of_an_earlier_failure_does_not_hide_that_of_the_withdrawal(
    control: RepositoryControl, folder: Path
) -> None:
    manifest = folder / SELF / "1" / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text("{}")
    with pytest.raises(ModelNotReadyError, match="failed to load"):
        control.load(SELF)
    manifest.write_text(whole)
    control.withdraw(control.repository.ready(SELF), REASON)
    assert control.index()[1] == OUT
