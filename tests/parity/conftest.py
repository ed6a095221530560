"""A server of the demo's models, of presets at their own widths and of models of lower precision."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess, serving
from tests.support.artifacts import cached_repositories, link_tree
from tests.support.repository import BF16, DEMO, FURTHER, SERVED


@pytest.fixture(scope="session")
def presets_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models. Only tests with the marker `thorough` need them."""
    folder = tmp_path_factory.mktemp("repository")
    for models in cached_repositories(DEMO, SERVED, FURTHER):
        for model in models.iterdir():
            if model.name != BF16:  # which a CPU cannot run
                link_tree(model, folder / model.name)
    return folder


@pytest.fixture(scope="session")
def presets_server(
    presets_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of them."""
    with serving(presets_repository, tmp_path_factory.mktemp("server") / "log") as process:
        yield process


@pytest.fixture(scope="session")
def presets_client(presets_server: ServerProcess) -> Iterator[AttentionClient]:
    """A client of that server."""
    with AttentionClient(presets_server.target) as client:
        yield client
