"""Processes of tests: servers of linked models, and programs in Python."""

import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scripts.local_server import ROOT, ServerProcess, serving
from tests.support.artifacts import link_tree


@contextmanager
def serving_models(folder: Path, models: Iterable[Path], *options: str) -> Iterator[ServerProcess]:
    """Runs a server of models until the block ends; its repository and its log lie in `folder`."""
    for model in models:
        link_tree(model, folder / "models" / model.name)
    with serving(folder / "models", folder / "log", *options) as server:
        yield server


def run_python(
    *arguments: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = 300
) -> "subprocess.CompletedProcess[str]":
    """Runs a program in Python; returns its status and what it prints."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def free_ports(count: int = 1) -> list[int]:
    """TCP ports that are free on loopback."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]
