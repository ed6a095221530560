"""A server of the small artifacts, for the bulk job's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.local_server import ServerProcess, serving


@pytest.fixture(scope="session")
def sample_server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It answers while the tests run."""
    with serving(artifacts, tmp_path_factory.mktemp("sample-server") / "log") as process:
        yield process
