"""Runs examples in this process, as `python -m examples.NAME` does."""

import runpy
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest

from scripts.local_server import ROOT

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: object) -> int:
    """Runs an example as the main program, and returns its exit status."""
    argv = [name, *map(str, arguments)]
    # runpy warns if a test has imported the example as a module before.
    quiet = warnings.catch_warnings(action="ignore", category=RuntimeWarning)
    with patch.object(sys, "argv", argv), quiet, pytest.raises(SystemExit) as end:
        runpy.run_module(f"examples.{name}", run_name="__main__", alter_sys=True)
    assert isinstance(end.value.code, int)
    return end.value.code


def scripts() -> list[Path]:
    """The files of all examples in Python."""
    return sorted(path for path in EXAMPLES.glob("*.py") if path.name != "__init__.py")
