"""Runs the examples of docs/http.md, and compares its table of routes with the routes."""

import re
import subprocess
import sys

import pytest

from attention_serving.server.http.routes import ROUTES
from tests.server.samples import ROOT

PAGE = (ROOT / "docs/http.md").read_text()
TARGET = "127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line.startswith("curl ")]


def test_there_is_something_to_run() -> None:
    assert len(commands()) == 3
    assert len(blocks("python")) == 1


@pytest.mark.parametrize("command", commands(), ids=range(len(commands())))
def test_command(port: int, command: str) -> None:
    command = command.replace(TARGET, f"127.0.0.1:{port}").replace("curl ", "curl --fail ")
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{")


@pytest.mark.parametrize("block", blocks("python"), ids=["python"])
def test_block(port: int, block: str) -> None:
    code = block.replace(TARGET, f"127.0.0.1:{port}")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(2, 3, 16) [3 3]\n"


@pytest.mark.parametrize("path", sorted({route.paths[0] for route in ROUTES}))
def test_route(path: str) -> None:
    routes = PAGE.partition("## Routes")[2].partition("## Tensors")[0]
    path = path.replace("cudasharedmemory", "systemsharedmemory")
    known = set(re.findall(r"/v[12][\w/{}]*", routes))
    ends = set(re.findall(r"\.\.\.(/\w+)", routes))
    assert path in known or any(path.endswith(end) for end in ends)
