"""The temporary folder of a service leaves nothing behind."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from attention_serving.server.workers.folder import PREFIX, temporary_folder
from tests.server.samples import ROOT


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_private_and_removed_at_the_end(temporary: Path) -> None:
    with temporary_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "counter_0.db").touch()
    assert not list(temporary.iterdir())


def test_a_folder_in_use_stays(temporary: Path) -> None:
    with temporary_folder() as first, temporary_folder() as second:
        assert first.exists()
        assert second.exists()
    assert not list(temporary.iterdir())


def test_the_folder_of_a_killed_process_is_removed_by_the_next(temporary: Path) -> None:
    code = (
        "import os; from attention_serving.server.workers.folder import temporary_folder\n"
        "with temporary_folder() as folder: (folder / 'counter_0.db').touch(); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert killed.returncode == -9
    (left,) = temporary.iterdir()
    with temporary_folder() as folder:
        assert list(temporary.iterdir()) == [folder]
        assert folder != left


def test_links_and_files_with_such_a_name_are_left_alone(temporary: Path) -> None:
    other = temporary / "other"
    other.mkdir()
    (other / "kept").touch()
    (temporary / f"{PREFIX}link").symlink_to(other, target_is_directory=True)
    (temporary / f"{PREFIX}file").touch()
    with temporary_folder():
        pass
    assert (other / "kept").exists()
    assert (temporary / f"{PREFIX}link").is_symlink()
    assert (temporary / f"{PREFIX}file").exists()
