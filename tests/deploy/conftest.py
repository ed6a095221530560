"""Fixtures of the tests that run containers."""

import shutil
from pathlib import Path

import pytest

from scripts.export_demo_models import DEMO_MODELS


@pytest.fixture(scope="session")
def models(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of the demo, readable by the user of the images."""
    folder = tmp_path_factory.mktemp("models")
    for name in DEMO_MODELS:
        shutil.copytree(repository / name, folder / name)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder
