"""Packages for Node.js: their dependencies, and commands in their folders."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

Finished = subprocess.CompletedProcess[str]


def run(package: Path, program: str, *arguments: str, env: Mapping[str, str] = os.environ) -> Finished:
    """Runs node or npm in the folder of a package."""
    return subprocess.run(
        [shutil.which(program) or program, *arguments],
        cwd=package,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=env,
    )


def succeed(process: Finished) -> None:
    """Fails with the output of a command that did not exit with status 0."""
    assert process.returncode == 0, process.stdout + process.stderr


def install(package: Path) -> None:
    """Installs the dependencies of the lock file unless they are installed; skips the test if it cannot."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    lock, installed_lock = package / "package-lock.json", package / "node_modules/.package-lock.json"
    if installed_lock.exists() and installed_lock.stat().st_mtime >= lock.stat().st_mtime:
        return
    installed = run(package, "npm", "ci", "--no-audit", "--no-fund")
    # A lock file that does not match package.json is a mistake here; other errors are the registry's.
    if installed.returncode != 0 and "EUSAGE" not in installed.stderr:
        pytest.skip(f"npm cannot install the dependencies: {installed.stderr.strip()[-300:]}")
    succeed(installed)
