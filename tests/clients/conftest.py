"""Fixtures of the clients' tests: a server of the small models, and the two ways to run a job on them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess, serving
from tests.clients.named_module import NAMED
from tests.support.artifacts import cached_repositories, link_tree


@pytest.fixture(scope="session")
def named() -> Path:
    """A repository of the module with named inputs."""
    (folder,) = cached_repositories(NAMED)
    return folder


@pytest.fixture(scope="session")
def sample_server(
    artifacts: Path, named: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of the small models, for all tests that do not stop it."""
    folder = tmp_path_factory.mktemp("sample-server")
    for models in (artifacts, named):
        link_tree(models, folder / "models")
    with serving(folder / "models", folder / "log") as process:
        yield process


@pytest.fixture(scope="session")
def sample_client(sample_server: ServerProcess) -> Iterator[AttentionClient]:
    """A client of it."""
    with AttentionClient(sample_server.target) as client:
        yield client


@pytest.fixture
def in_process(artifacts: Path) -> dict[str, Any]:
    """The options of a job in this process."""
    return {"model_repository": artifacts}


@pytest.fixture(params=["in process", "on a server"])
def backend_options(request: pytest.FixtureRequest, in_process: dict[str, Any]) -> dict[str, Any]:
    """The options that choose a backend."""
    if request.param == "in process":
        return in_process
    server: ServerProcess = request.getfixturevalue("sample_server")
    return {"servers": [server.target]}
