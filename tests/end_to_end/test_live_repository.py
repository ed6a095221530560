"""A repository that changes while requests are answered: on request and by polling, in one process or two."""

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess, serving
from tests.support import triton_methods
from tests.support.eager import Array, assert_parity, attend
from tests.support.systems import build
from tests.support.triton import in_another_process

NAME, OTHER = "swapped", "causal-self-attention"
# Each version is another model of the same inputs.
VERSIONS = {"1": "self-attention", "2": "fused-self-attention", "3": "concatenated-multi-head"}
PATIENCE_SECONDS = 60.0
CALLERS = 4
QUERY = np.random.default_rng(7).standard_normal((6, 16), np.float32)


@pytest.fixture
def exported(repository: Path, tmp_path: Path) -> Path:
    """The versions of the model, outside the served repository."""
    for version, name in VERSIONS.items():
        folder = tmp_path / "exported" / version
        shutil.copytree(repository / name / "1", folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"name": NAME, "version": int(version)}))
    return tmp_path / "exported"


@pytest.fixture
def folder(exported: Path, repository: Path, tmp_path: Path) -> Path:
    """A repository with the first version only, and with another model."""
    shutil.copytree(exported / "1", tmp_path / "models" / NAME / "1")
    shutil.copytree(repository / OTHER, tmp_path / "models" / OTHER)
    return tmp_path / "models"


@contextmanager
def explicit(folder: Path, *options: str) -> Iterator[ServerProcess]:
    log = folder.parent / "log"
    with serving(folder, log, "--model-control=explicit", "--version-policy=latest", *options) as server:
        yield server


def add(exported: Path, folder: Path, version: str) -> None:
    """Adds a version in one step, as an export does."""
    temporary = folder / f".{version}"
    shutil.copytree(exported / version, temporary)
    temporary.rename(folder / NAME / version)


def ask(server: ServerProcess, method: str, *arguments: Any, **options: Any) -> Any:
    return in_another_process(triton_methods.ask, server.target, method, *arguments, **options)


def index(server: ServerProcess) -> dict[tuple[str, str], str]:
    models = ask(server, "get_model_repository_index", as_json=True)["models"]
    return {(model["name"], model["version"]): model["state"] for model in models}


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


class Callers:
    """Threads that ask until they are stopped, and compare each answer with that of its version."""

    def __init__(self, target: str) -> None:
        self.versions: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self._target = target
        self._expected: dict[str, Array] = {
            version: attend(build(name), QUERY)[0] for version, name in VERSIONS.items()
        }
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(CALLERS)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    def wait_for(self, version: str) -> None:
        """Waits until a version has answered, or a request has failed."""
        wait_until(lambda: self.versions[version] > 0 or bool(self.errors))

    def _queries(self) -> Iterator[Array]:
        while not self._stop.is_set():
            yield QUERY

    def _call(self) -> None:
        try:
            with AttentionClient(self._target) as client:
                for result in client.attend_stream(NAME, self._queries()):
                    expected = self._expected[result.model_version]
                    assert_parity(result.context_vectors, expected)
                    self.versions[result.model_version] += 1
        except BaseException as error:
            self.errors.append(error)


def test_versions_change_under_load_without_a_failed_request(exported: Path, folder: Path) -> None:
    with explicit(folder, "--load-model=*") as server, Callers(server.target) as callers:
        for version in list(VERSIONS)[1:]:
            add(exported, folder, version)
            assert ask(server, "load_model", NAME) is None
            callers.wait_for(version)
        shutil.copytree(folder / NAME / "3", folder / NAME / "4")
        assert "version 4 failed to load" in ask(server, "load_model", NAME)
        assert index(server)[NAME, "4"] == "UNAVAILABLE"
        assert ask(server, "unload_model", OTHER) is None
        assert ask(server, "is_model_ready", OTHER) is False
        assert ask(server, "load_model", OTHER) is None
        assert ask(server, "is_model_ready", OTHER) is True
    assert callers.errors == []
    assert set(callers.versions) == set(VERSIONS)


@pytest.mark.thorough
def test_every_worker_follows_the_repository_without_a_failed_request(exported: Path, folder: Path) -> None:
    options = ("--model-control=poll", "--repository-poll-seconds=0.1", "--version-policy=latest")
    log = folder.parent / "log"
    with (
        serving(folder, log, "--workers=2", *options) as server,
        Callers(server.target) as callers,
    ):
        for version in list(VERSIONS)[1:]:
            add(exported, folder, version)
            callers.wait_for(version)
            ready = f" model ready model={NAME} version={version} "
            wait_until(lambda ready=ready: log.read_text().count(ready) == 2)  # type: ignore[misc]
        shutil.rmtree(folder / OTHER)
        wait_until(lambda: log.read_text().count(f" model freed model={OTHER} ") == 2)
        assert "start the server with --model-control explicit" in ask(server, "load_model", NAME)
    assert callers.errors == []
    assert set(callers.versions) == set(VERSIONS)


@pytest.mark.thorough
def test_what_was_loaded_survives_a_restart(folder: Path) -> None:
    with explicit(folder) as server:
        assert index(server) == {(NAME, "1"): "UNAVAILABLE", (OTHER, "1"): "UNAVAILABLE"}
        assert ask(server, "load_model", OTHER) is None
        server.stop()
    with explicit(folder, f"--load-model={NAME}") as server:
        assert index(server) == {(NAME, "1"): "READY", (OTHER, "1"): "READY"}
        refused = ask(server, "load_model", "nonesuch")
        assert refused == "StatusCode.FAILED_PRECONDITION: model 'nonesuch' does not exist in the repository"
        assert "model_repository" in ask(server, "get_server_metadata", as_json=True)["extensions"]
