"""Certificates at load: with a public key only signed artifacts are served; without one nothing changes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from attention_client import AttentionClient, FailedPreconditionError

from attention_serving.artifact.certificate import CERTIFICATE_FILE
from attention_serving.export.certificate import sign_artifact
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import RepositoryControl
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import FailedModel, Repository
from scripts.local_server import serving, start
from tests.server.damage import DEVICE
from tests.server.samples import CROSS, SELF
from tests.server.test_canary import wait_until
from tests.support.keys import new_key, write_keys

KEY, OTHER = new_key(), new_key()
KEYS = (OTHER.public_key, KEY.public_key)


@pytest.fixture
def folder(artifacts: Path, tmp_path: Path) -> Path:
    """A repository of two artifacts, one of which is signed."""
    for name in (SELF, CROSS):
        shutil.copytree(artifacts / name, tmp_path / "models" / name)
    sign_artifact(tmp_path / "models" / SELF / "1", KEY)
    return tmp_path / "models"


def failure(folder: Path, name: str = SELF) -> FailedModel:
    model = ModelStore(folder, DEVICE, proof_keys=KEYS).load(name, "1")
    assert isinstance(model, FailedModel)
    assert str(folder.parent) not in model.reason
    return model


def test_a_signed_artifact_is_loaded_and_an_unsigned_one_is_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(ModelStore(folder, DEVICE, proof_keys=KEYS).load(SELF, "1"), LoadedModel)
    assert failure(folder, CROSS).reason.startswith(
        f"{CERTIFICATE_FILE}: is missing: the artifact is not signed"
    )
    (record,) = [vars(each) for each in caplog.records if each.levelname == "ERROR"]
    assert record["reason"].startswith(f"{folder / CROSS / '1' / CERTIFICATE_FILE}: is missing")


def test_without_a_public_key_certificates_are_not_looked_at(folder: Path) -> None:
    (folder / SELF / "1" / CERTIFICATE_FILE).write_text("damaged")
    for name in (SELF, CROSS):
        assert isinstance(ModelStore(folder, DEVICE).load(name, "1"), LoadedModel)


def change_graph(folder: Path) -> None:
    graph = folder / "model.onnx"
    graph.write_bytes(graph.read_bytes() + b"\0")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another key": (
        lambda folder: sign_artifact(folder, new_key()),
        f"{CERTIFICATE_FILE}: is not signed with a trusted key",
    ),
    "of another artifact": (
        lambda folder: shutil.copy(sign_artifact(folder.parents[1] / CROSS / "1", KEY), folder),
        f"{CERTIFICATE_FILE}: is the certificate of another artifact",
    ),
    "a changed file": (change_graph, "model.onnx: SHA-256 is "),
}


@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES)
def test_what_was_not_signed_is_refused_with_a_reason(
    change: Callable[[Path], object], says: str, folder: Path
) -> None:
    change(folder / SELF / "1")
    assert failure(folder).reason.startswith(says)


def test_an_artifact_that_is_not_signed_never_reaches_the_runtime(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    monkeypatch.setattr(
        "attention_serving.server.engine.models.loading.Session", lambda *given, **_: opened.append(given)
    )
    failure(folder, CROSS)
    assert opened == []


def test_polling_takes_an_artifact_once_it_is_signed(folder: Path) -> None:
    store = ModelStore(folder, DEVICE, proof_keys=KEYS)
    control = RepositoryControl(store, Repository(store.load(name, "1") for name in (SELF, CROSS)))
    kept = control.repository.ready(SELF)
    assert list(control.changed_on_disk()) == []
    sign_artifact(folder / CROSS / "1", OTHER)
    assert list(control.changed_on_disk()) == [CROSS]
    control.load(CROSS, strict=False)
    assert control.repository.ready(CROSS).version == "1"
    assert control.repository.ready(SELF) is kept
    assert list(control.changed_on_disk()) == []


def test_without_a_public_key_a_new_certificate_is_no_change(folder: Path) -> None:
    store = ModelStore(folder, DEVICE)
    control = RepositoryControl(store, Repository([store.load(CROSS, "1")]))
    sign_artifact(folder / CROSS / "1", KEY)
    assert list(control.changed_on_disk()) == [SELF]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_with_a_public_key_serves_what_is_signed(folder: Path, tmp_path: Path, workers: int) -> None:
    _, public = write_keys(tmp_path, KEY)
    options = (f"--proof-public-key={public}", f"--workers={workers}")
    with serving(folder, tmp_path / "log", *options) as server, AttentionClient(server.target) as client:
        wait_until(lambda: {model.name: model.state for model in client.models()}[SELF] == "ready")
        found = {model.name: (model.state, model.state_reason) for model in client.models()}
        with pytest.raises(FailedPreconditionError, match="the artifact is not signed"):
            client.attend(CROSS, [[1.0] * 4], [[1.0] * 6], [[1.0] * 5])
    assert found[SELF] == ("ready", "")
    state, reason = found[CROSS]
    assert state == "failed"
    assert reason.startswith(f"{CERTIFICATE_FILE}: is missing")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_does_not_start_with_a_file_that_has_no_public_key(
    folder: Path, tmp_path: Path, workers: int
) -> None:
    private, _ = write_keys(tmp_path, KEY)
    log = tmp_path / "log"
    process = start(folder, log, f"--proof-public-key={private}", f"--workers={workers}")
    assert process.wait(timeout=60) == 1
    assert f"--proof-public-key: {private}: contains a PRIVATE KEY" in log.read_text()
