"""A repository that changes while requests are answered: on request and by polling, in one process or two."""

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

from attention_serving.export.artifact import write_artifact
from attention_serving.export.model_id import ModelId
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.presets import build_preset
from scripts.local_server import ServerProcess, serving
from tests.support import triton_methods
from tests.support.artifacts import ModelSet, cached_repositories
from tests.support.eager import Array, attend
from tests.support.triton import in_another_process

NAME, OTHER = "swapped", "other"
VERSIONS = ("1", "2", "3", "4", "5", "6")
PATIENCE_SECONDS = 60.0
CALLERS = 4
REQUESTS = 20_000
QUERY = np.random.default_rng(7).standard_normal((6, 16), np.float32)


def module(version: str) -> MultiHeadAttention:
    found = build_preset("self-attention", seed=int(version))
    assert isinstance(found, MultiHeadAttention)
    return found


def export_versions(folder: Path) -> None:
    for version in VERSIONS:
        write_artifact(module(version), ModelId(NAME, int(version)), folder)
    write_artifact(module("1"), ModelId(OTHER), folder)


@pytest.fixture(scope="module")
def exported() -> Path:
    """Six versions of a model, each with weights of its own, and another model."""
    (folder,) = cached_repositories(ModelSet("live", [export_versions], [Path(__file__)]))
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A repository with the first version only."""
    shutil.copytree(exported / NAME / "1", tmp_path / "models" / NAME / "1")
    shutil.copytree(exported / OTHER, tmp_path / "models" / OTHER)
    return tmp_path / "models"


@contextmanager
def explicit(folder: Path, *options: str) -> Iterator[ServerProcess]:
    log = folder.parent / "log"
    with serving(folder, log, "--model-control=explicit", "--version-policy=latest", *options) as server:
        yield server


def add(exported: Path, folder: Path, version: str) -> None:
    """Adds a version in one step, as an export does."""
    temporary = folder / f".{version}"
    shutil.copytree(exported / NAME / version, temporary)
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
            version: attend(module(version), QUERY)[0] for version in VERSIONS
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
                    np.testing.assert_allclose(result.context_vectors, expected, rtol=1e-4, atol=1e-5)
                    self.versions[result.model_version] += 1
        except BaseException as error:
            self.errors.append(error)


def test_versions_change_under_load_without_a_failed_request(exported: Path, folder: Path) -> None:
    with explicit(folder, "--load-model=*") as server, Callers(server.target) as callers:
        for version in VERSIONS[1:]:
            add(exported, folder, version)
            assert ask(server, "load_model", NAME) is None
            callers.wait_for(version)
        bad = folder / NAME / "7"
        shutil.copytree(folder / NAME / "6", bad)
        assert "version 7 failed to load" in ask(server, "load_model", NAME)
        assert index(server)[NAME, "7"] == "UNAVAILABLE"
        assert ask(server, "unload_model", OTHER) is None
        assert ask(server, "is_model_ready", OTHER) is False
        assert ask(server, "load_model", OTHER) is None
        assert ask(server, "is_model_ready", OTHER) is True
        wait_until(lambda: sum(callers.versions.values()) >= REQUESTS or bool(callers.errors))
    assert callers.errors == []
    assert sum(callers.versions.values()) >= REQUESTS
    assert set(callers.versions) == set(VERSIONS)


def test_every_worker_follows_the_repository_without_a_failed_request(exported: Path, folder: Path) -> None:
    options = ("--model-control=poll", "--repository-poll-seconds=0.1", "--version-policy=latest")
    log = folder.parent / "log"
    with (
        serving(folder, log, "--workers=2", *options) as server,
        Callers(server.target) as callers,
    ):
        for version in VERSIONS[1:]:
            add(exported, folder, version)
            callers.wait_for(version)
            ready = f" model ready model={NAME} version={version} "
            wait_until(lambda ready=ready: log.read_text().count(ready) == 2)  # type: ignore[misc]
    assert callers.errors == []
    assert set(callers.versions) == set(VERSIONS)


def test_what_was_loaded_survives_a_restart(folder: Path) -> None:
    with explicit(folder) as server:
        assert index(server) == {(NAME, "1"): "UNAVAILABLE", (OTHER, "1"): "UNAVAILABLE"}
        assert ask(server, "load_model", OTHER) is None
        server.stop()
    with explicit(folder, f"--load-model={NAME}") as server:
        assert index(server) == {(NAME, "1"): "READY", (OTHER, "1"): "READY"}
        assert ask(server, "unload_model", NAME) is None
        refused = ask(server, "load_model", "nonesuch")
        assert refused == "StatusCode.FAILED_PRECONDITION: model 'nonesuch' does not exist in the repository"
        refused = ask(server, "load_model", NAME, config="{}")
        assert refused.startswith("StatusCode.INVALID_ARGUMENT: parameters[config]: is not supported")
        assert "model_repository" in ask(server, "get_server_metadata", as_json=True)["extensions"]


def test_polling_follows_the_repository(exported: Path, folder: Path) -> None:
    options = ("--model-control=poll", "--repository-poll-seconds=0.1", "--version-policy=latest")
    with serving(folder, folder.parent / "log", *options) as server, AttentionClient(server.target) as client:
        assert client.attend(NAME, QUERY).model_version == "1"
        add(exported, folder, "2")
        wait_until(lambda: client.attend(NAME, QUERY).model_version == "2")
        incomplete = folder / NAME / "3"
        shutil.copytree(exported / NAME / "3", incomplete, ignore=shutil.ignore_patterns("manifest.json"))
        time.sleep(0.5)
        assert client.attend(NAME, QUERY).model_version == "2"
        shutil.copy(exported / NAME / "3" / "manifest.json", incomplete)
        wait_until(lambda: client.attend(NAME, QUERY).model_version == "3")
        shutil.rmtree(folder / OTHER)
        wait_until(lambda: (OTHER, "1") not in index(server))
        assert "start the server with --model-control explicit" in ask(server, "load_model", NAME)
