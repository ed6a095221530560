"""Fixtures of the chaos cases: their models, and the process that generates load."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from benchmarks.processes import worker
from tests.encoders.repository import SENTENCE, SENTENCE_MODELS
from tests.support.artifacts import ModelSet, cached_repositories
from tests.support.repository import export_preset

WIDE = "multi-head-768x12"
PRESET = ModelSet("chaos", [partial(export_preset, WIDE)], [Path(__file__)])


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of multi-head-768x12 alone, which loads fast, as copies."""
    (presets,), folder = cached_repositories(PRESET), tmp_path_factory.mktemp("wide")
    shutil.copytree(presets / WIDE, folder / WIDE)
    folder.chmod(0o755)  # the servers of containers run as another user
    return folder


@pytest.fixture(scope="session")
def models(wide: Path, artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of large and small models of several kinds, as copies."""
    (encoders,), folder = cached_repositories(SENTENCE_MODELS), tmp_path_factory.mktemp("models")
    for source in (*artifacts.iterdir(), wide / WIDE, encoders / SENTENCE):
        shutil.copytree(source, folder / source.name)
    return folder


@pytest.fixture(scope="module")
def generator() -> Iterator[ProcessPoolExecutor]:
    """A process that generates load."""
    with worker() as pool:
        yield pool
