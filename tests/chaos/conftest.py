"""Fixtures of the chaos cases: their models, and the process that generates load."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from benchmarks.processes import worker
from tests.support.artifacts import cached_repositories
from tests.support.repository import SETS

PRESETS = ("multi-head-768x12", "rotary-768x12")


@pytest.fixture(scope="session")
def models(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of large and small models of several kinds, as copies."""
    folder = tmp_path_factory.mktemp("models")
    (large,) = cached_repositories(next(models for models in SETS if models.name == "presets"))
    for source in (*artifacts.iterdir(), *(large / name for name in PRESETS)):
        shutil.copytree(source, folder / source.name)
    return folder


@pytest.fixture(scope="session")
def wide(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of multi-head-768x12 alone, which loads fast."""
    folder = tmp_path_factory.mktemp("wide")
    shutil.copytree(models / PRESETS[0], folder / PRESETS[0])
    return folder


@pytest.fixture(scope="module")
def generator() -> Iterator[ProcessPoolExecutor]:
    """A process that generates load."""
    with worker() as pool:
        yield pool
