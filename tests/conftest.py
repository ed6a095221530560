"""Fixtures that many tests share: exported models, a server and a client of them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

# The modules are small, and the machine's cores are for the servers and the test workers; the processes that
# tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import attention_serving.server  # noqa: F401, I001 - first: it sets what gRPC's core reads when it is imported
import pytest
import torch
from attention_client import AttentionClient
from hypothesis import settings

from scripts.local_server import ServerProcess, serving
from tests.encoders.repository import SENTENCE_MODELS
from tests.server import samples
from tests.support import systems
from tests.support.artifacts import SETS, cached_repositories, link_tree
from tests.support.repository import FURTHER

torch.set_num_threads(1)
# Processes that tests start would inherit an ignored hang-up, as of a suite that runs under nohup.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# How long an example takes depends on what else the machine does, so that no example has a deadline.
settings.register_profile("suite", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("suite")


# These tests wait for processes or export models. They start early, so that no worker is left with a long
# test when the other has finished.
SLOW = ("end_to_end/", "parity/", "clients/enrich/", "export/", "server/process/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long tests first."""
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(SLOW))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exports what the chosen tests need at once, so that their workers do not wait for each other."""
    if os.environ.get("PYTEST_XDIST_WORKER") and not session.config.option.collectonly:
        needed = {name for item in session.items for name in getattr(item, "fixturenames", ())}
        cached_repositories(*(models for models in SETS if needed.intersection(models.fixtures)))


@pytest.fixture(scope="session")
def repository(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository of every attention system at a small width. Tests must not write to it."""
    folder, (models,) = tmp_path_factory.mktemp("systems"), cached_repositories(systems.MODELS)
    for model in (*models.iterdir(), artifacts / samples.TEXT):
        link_tree(model, folder / model.name)
    return folder


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """A repository of a causal, a cross-attention and a text model. Tests must not write to it."""
    (folder,) = cached_repositories(samples.MODELS)
    return folder


@pytest.fixture(scope="session")
def further() -> Path:
    """A repository of further models, which only tests with the marker `thorough` need."""
    (folder,) = cached_repositories(FURTHER)
    return folder


@pytest.fixture(scope="session")
def sentence_repository() -> Path:
    """A repository of one text encoder. Tests must not write to it."""
    (folder,) = cached_repositories(SENTENCE_MODELS)
    return folder


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the repository."""
    with serving(repository, tmp_path_factory.mktemp("server") / "log") as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[AttentionClient]:
    """A client of the server, also of one that a folder or a file has in place of it."""
    with AttentionClient(server.target) as client:
        yield client
