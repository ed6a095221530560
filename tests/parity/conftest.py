"""A server of every preset, worked example and reference, and the served paths of its models by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess, serving
from tests.parity import paths
from tests.support.artifacts import cached_repositories, link_tree
from tests.support.repository import SETS


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models at their own widths. Only tests with the marker `thorough` need them."""
    folder = tmp_path_factory.mktemp("repository")
    for models in cached_repositories(*SETS):
        for model in models.iterdir():
            link_tree(model, folder / model.name)
    return folder


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the repository."""
    with serving(repository, tmp_path_factory.mktemp("server") / "log") as process:
        yield process


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[AttentionClient]:
    """A client of the server."""
    with AttentionClient(server.target) as client:
        yield client


@pytest.fixture
def routes(repository: Path, server: ServerProcess, client: AttentionClient) -> paths.Routes:
    """The paths of the models of the shared server."""
    return paths.routes(repository, server, client)
