"""A repository that changes on request while requests are answered."""

import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat, takewhile
from pathlib import Path

import numpy as np
import pytest
from attention_client import AttentionClient

from scripts.local_server import serving
from tests.server.seams import wait_until
from tests.support.eager import assert_parity, attend
from tests.support.systems import build
from tests.support.triton import ask

NAME, OTHER = "swapped", "multi-head-64x4"
# Each version is another model of the same inputs.
VERSIONS = {"1": "self-attention", "2": "simple-self-attention", "3": "stacked-multi-head"}
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
    add(exported, tmp_path / "models", "1")
    shutil.copytree(repository / OTHER, tmp_path / "models" / OTHER)
    return tmp_path / "models"


def add(exported: Path, folder: Path, version: str) -> None:
    """Adds a version."""
    shutil.copytree(exported / version, folder / NAME / version)


@contextmanager
def callers(target: str) -> Iterator[Counter[str]]:
    """Asks until the block ends, and counts the answers, which must be those of their versions."""
    expected = {version: attend(build(name), QUERY)[0] for version, name in VERSIONS.items()}
    answers, is_over = Counter[str](), threading.Event()

    def call() -> None:
        with AttentionClient(target) as client:
            for result in client.attend_stream(
                NAME, takewhile(lambda _: not is_over.is_set(), repeat(QUERY))
            ):
                assert_parity(result.context_vectors, expected[result.model_version])
                answers[result.model_version] += 1

    with ThreadPoolExecutor(CALLERS) as pool:
        calls = [pool.submit(call) for _ in range(CALLERS)]
        try:
            yield answers
        finally:
            is_over.set()
    for each in calls:
        each.result()


def test_versions_change_under_load_without_a_failed_request(exported: Path, folder: Path) -> None:
    options = ("--model-control=explicit", "--load-model=*", "--version-policy=latest")
    with serving(folder, folder.parent / "log", *options) as server, callers(server.target) as answers:
        for version in list(VERSIONS)[1:]:
            add(exported, folder, version)
            assert ask(server.target, "load_model", NAME) is None
            wait_until(lambda version=version: answers[version] > 0)  # type: ignore[misc]
        assert ask(server.target, "unload_model", OTHER) is None
        assert ask(server.target, "is_model_ready", OTHER) is False
        assert ask(server.target, "load_model", OTHER) is None
        assert ask(server.target, "is_model_ready", OTHER) is True
    assert set(answers) == set(VERSIONS)


def test_a_server_of_an_empty_folder_is_ready_when_a_model_appears(repository: Path, tmp_path: Path) -> None:
    folder, options = tmp_path / "models", ("--model-control=poll", "--repository-poll-seconds=0.1")
    folder.mkdir()
    with serving(folder, tmp_path / "log", *options) as server:
        assert "does not contain a <name>/<version>/ folder that user" in server.log.read_text()
        states = [ask(server.target, f"is_server_{state}") for state in ("live", "ready")]
        assert states == [True, False]
        shutil.copytree(repository / OTHER, folder / OTHER)
        wait_until(lambda: ask(server.target, "is_server_ready"))
