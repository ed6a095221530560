"""Fixtures that many tests share: exported artifacts and a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attention_client import AttentionClient

from export.artifact import Naming, write_artifact
from model.presets import PRESETS, build_preset
from tests.support.serving import ServerProcess, serving
from tests.support.tables import GOLDEN_TABLES


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with every preset and every worked example. Tests do not write to it."""
    folder = tmp_path_factory.mktemp("repository")
    for preset in PRESETS.values():
        write_artifact(build_preset(preset.name), Naming(preset.name, 1, preset.description), folder)
    for table in GOLDEN_TABLES:
        write_artifact(table.module(), Naming(table.id, 1, str(table.case["what"])), folder)
    return folder


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of all those models."""
    with serving(repository, tmp_path_factory.mktemp("server") / "log") as process:
        yield process


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[AttentionClient]:
    """A client of that server."""
    with AttentionClient(server.target) as client:
        yield client
