"""Fixtures of the clients' tests: a server of the small models, and the two ways to run a job on them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.local_server import ServerProcess
from tests.clients.named_module import NAMED
from tests.support.artifacts import cached_repositories
from tests.support.processes import serving_models


@pytest.fixture(scope="session")
def named() -> Path:
    """A repository of the module with named inputs."""
    (folder,) = cached_repositories(NAMED)
    return folder


@pytest.fixture(scope="session")
def server(artifacts: Path, named: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the small models, for all tests that do not stop it."""
    models = [*artifacts.iterdir(), *named.iterdir()]
    with serving_models(tmp_path_factory.mktemp("sample-server"), models) as process:
        yield process


@pytest.fixture
def in_process(artifacts: Path) -> dict[str, Any]:
    """The options of a job in this process."""
    return {"model_repository": artifacts}


@pytest.fixture(params=["in process", "on a server"])
def backend_options(request: pytest.FixtureRequest, in_process: dict[str, Any]) -> dict[str, Any]:
    """The options that choose a backend."""
    if request.param == "in process":
        return in_process
    return {"servers": [request.getfixturevalue("server").target]}
