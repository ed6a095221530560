"""What was verified is what serves, whatever happens to the files of the repository.

Run as `python -m tests.server.engine.models.test_copies FOLDER`, this file overwrites and cuts the artifact
that it serves. It is a process of its own: a process that maps a file that is cut is killed.
"""

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.manifest import Manifest, read_manifest
from attention_serving.artifact.names import ModelId
from attention_serving.export import artifact
from attention_serving.export.artifact import WEIGHTS_FILE, write_artifact
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import ModelNotReadyError
from attention_serving.server.engine.models import loading
from attention_serving.server.engine.models.control import ModelControl
from attention_serving.server.engine.models.copies import ArtifactCopy
from attention_serving.server.engine.models.loading import ModelStore, load_model
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import DecodedRequest, Mask, MaskKind, Ragged
from tests.server.seams import wait_until
from tests.support.coroutines import submitted
from tests.support.processes import run_python

DEVICE, NAME = Device(threads=1), "mapped"
CALLERS, ROUNDS = 4, 5
QUERY = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository `old` and a repository `new`, each with other weights of the same model, in a file."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifact, "EXTERNAL_BYTES", 1)
        for seed, name in enumerate(("old", "new")):
            torch.manual_seed(seed)
            module = MultiHeadAttention(AttentionConfig(d_query=64, num_heads=2)).eval()
            write_artifact(module, ModelId(NAME), folder / name)
    return folder


def overwrite(source: Path, served: Path) -> None:
    """As `cp` does: the files stay the same, with other bytes."""
    for path in source.iterdir():
        shutil.copyfile(path, served / path.name)


def ask(engine: Engine) -> np.ndarray:
    """The answer of the graph with a mask, whose weights are not packed."""
    mask = Mask(MaskKind.KEYS, np.ones(len(QUERY), np.bool_))
    request = DecodedRequest(inputs={"query": Ragged(QUERY, (len(QUERY),))}, mask=mask)
    result = submitted(engine, engine.repository.ready(NAME), request).result()
    return result.outputs["context_vectors"][0]


def main(exported: Path) -> None:
    """Overwrites the served artifact again and again while callers ask, and then cuts its weights."""
    loading.SMALL_ARTIFACT_BYTES = 0
    expected = {}
    for name in ("old", "new"):
        engine = Engine(Repository([ModelStore(exported / name, DEVICE).load(NAME, "1")]))
        expected[name] = ask(engine)
        engine.close()
    served, counts, is_over = exported / "served", Counter[str](), threading.Event()
    shutil.copytree(exported / "old", served)
    store = ModelStore(served, DEVICE)
    control = ModelControl(store, Repository([store.load(NAME, "1")]))
    engine = Engine(control.repository)

    def call() -> None:
        while not is_over.is_set():
            try:
                answer = ask(engine)
            except ModelNotReadyError:
                counts["refused"] += 1
                continue
            names = [name for name in expected if np.array_equal(answer, expected[name])]
            counts[names[0] if names else "mixed"] += 1

    with ThreadPoolExecutor(CALLERS) as pool:
        calls = [pool.submit(call) for _ in range(CALLERS)]
        for _ in range(ROUNDS):
            for name in ("new", "old"):
                overwrite(exported / name / NAME / "1", served / NAME / "1")
                before = counts[name]
                for _ in range(2):
                    control.poll_once()
                wait_until(lambda name=name, before=before: counts[name] > before)  # type: ignore[misc]
        with (served / NAME / "1" / WEIGHTS_FILE).open("r+b") as file:
            file.truncate(0)
        before = counts["old"]
        wait_until(lambda: counts["old"] > before + CALLERS)
        assert not counts["refused"]
        control.poll_once()
        wait_until(lambda: counts["refused"] > 0)
        is_over.set()
    for each in calls:
        each.result()
    engine.close()
    assert not counts["mixed"], counts
    sys.stdout.write(control.index()[0].reason)


def test_an_artifact_that_is_overwritten_or_cut_under_load_serves_the_old_or_the_new_and_no_mixture(
    exported: Path,
) -> None:
    done = run_python("-m", "tests.server.engine.models.test_copies", exported)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"its files in the repository were changed; {WEIGHTS_FILE}: SHA-256 is")


@pytest.fixture
def served(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported / "old", tmp_path / "served")
    return tmp_path / "served" / NAME / "1"


def test_what_is_overwritten_after_it_was_verified_is_not_what_is_loaded(
    exported: Path, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = Manifest.verify_files

    def overwritten(manifest: Manifest, folder: Path, *copy: Path) -> None:
        verify(manifest, folder, *copy)
        overwrite(exported / "new" / NAME / "1", served)

    answers = []
    for _ in range(2):
        model = load_model(served, DEVICE)
        case = model.golden[0]
        answers.append(model.sessions[case.graph].run(case.inputs)["context_vectors"])
        del model
        monkeypatch.setattr(Manifest, "verify_files", overwritten)
    assert np.array_equal(answers[0], answers[1])


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of temporary files that no other process has."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_a_copy_is_shared_and_removed_once_nobody_uses_it_and_made_anew_if_it_is_damaged(
    served: Path, temporary: Path
) -> None:
    content = read_manifest(served)
    first, second = (ArtifactCopy(served, Manifest.load(served), content) for _ in range(2))
    assert first.folder == second.folder
    first.close()
    (second.folder / WEIGHTS_FILE).write_bytes(b"")
    third = ArtifactCopy(served, Manifest.load(served), content)
    Manifest.load(third.folder).verify_files(third.folder)
    second.close()
    (killed := third.folder.with_name("killed")).mkdir()
    assert list(third.folder.parent.iterdir()) == [third.folder, killed]
    del third
    assert list(killed.parent.iterdir()) == []
    killed.parent.chmod(0o755)
    with pytest.raises(ArtifactError, match="there is not a folder of this user alone"):
        load_model(served, DEVICE)
    killed.parent.rmdir()
    temporary.rmdir()
    with pytest.raises(ArtifactError, match=r"cannot be copied .*: No such file .*; free space there"):
        load_model(served, DEVICE)


# Loads a model in a process that has a segmentation fault where it opens a session.
CRASH = """
import ctypes, logging, sys
from pathlib import Path
from attention_serving.server.engine.models import loading
from attention_serving.server.engine.run.provider import Device

logging.basicConfig(level="INFO", format="%(message)s %(model)s %(version)s")
loading.Session = lambda *_, **__: ctypes.string_at(0)
loading.ModelStore(Path(sys.argv[1]), Device(threads=1)).load(sys.argv[2], "1")
"""


def test_an_artifact_that_crashed_two_processes_is_set_aside_until_it_changes(
    exported: Path, served: Path, temporary: Path
) -> None:
    store = ModelStore(served.parents[1], DEVICE)
    for _ in range(2):
        done = run_python("-c", CRASH, store.folder, NAME, env=os.environ | {"TMPDIR": str(temporary)})
        assert (done.returncode, done.stderr) == (-signal.SIGSEGV, f"model loading {NAME} 1\n")
    control = ModelControl(store, Repository([store.load(NAME, "1")]))
    assert "2 processes crashed while they loaded this artifact; it is not" in control.index()[0].reason
    with pytest.raises(ArtifactError, match=r"this file is removed: Segmentation fault$") as error:
        load_model(served, DEVICE)

    overwrite(exported / "new" / NAME / "1", served)
    for _ in range(2):
        control.poll_once()
    assert control.repository.ready(NAME)
    overwrite(exported / "old" / NAME / "1", served)
    error.value.path.unlink()
    load_model(served, DEVICE)
    assert not list(temporary.glob("*/*.crashes"))


def test_a_crash_that_is_not_repeated_is_forgotten(served: Path, temporary: Path) -> None:
    for _ in range(2):
        run_python("-c", CRASH, served.parents[1], NAME, env=os.environ | {"TMPDIR": str(temporary)})
        load_model(served, DEVICE)


def test_an_artifact_that_is_renamed_into_place_is_served_without_a_pause(
    exported: Path, served: Path
) -> None:
    store = ModelStore(served.parents[1], DEVICE)
    control = ModelControl(store, Repository([store.load(NAME, "1")]))
    old = control.repository.ready(NAME)
    shutil.copytree(exported / "new" / NAME / "1", served.with_name(".1.new"))
    served.rename(served.with_name(".1.old"))
    control.poll_once()
    assert control.repository.ready(NAME) is old
    served.with_name(".1.new").rename(served)
    control.poll_once()
    assert control.repository.ready(NAME) is old
    control.poll_once()
    assert control.repository.ready(NAME) is not old


if __name__ == "__main__":
    main(Path(sys.argv[1]))
