"""Prometheus' own tools, where they are installed."""

import subprocess
import urllib.request

import pytest

from scripts.check_dashboard import PROGRAMS, ProgramNotFoundError, find_program


def required(name: str) -> str:
    """The path of a program; skips the test if it is not installed."""
    try:
        return find_program(name)
    except ProgramNotFoundError:
        pytest.skip(f"{name} is neither on PATH nor named by the variable {PROGRAMS[name]}")


def check_metrics(promtool: str, text: str) -> str:
    """What `promtool check metrics` finds in a page of metrics; empty if nothing."""
    found = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    return f"{found.stdout}{found.stderr}".strip()


def page(port: int) -> str:
    """The metrics that an endpoint serves."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text: str = response.read().decode()
    return text
