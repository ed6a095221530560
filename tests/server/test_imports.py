"""Who may import whom: the server needs no PyTorch, the engine no gRPC, the surface no ONNX Runtime."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import server
from tests.server.samples import ROOT

FILES = sorted((ROOT / "server").rglob("*.py"))
MAKERS = {
    "torch",
    "model",
    "export",
    "onnx",
    "onnxscript",
    "attention_client",
    "clients",
    "tests",
    "benchmarks",
    "scripts",
}


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, wherever in the file; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(*packages: str, under: str = "") -> set[str]:
    """Files of the server that import one of those packages or something of them."""
    return {
        str(path.relative_to(ROOT))
        for path in FILES
        if path.is_relative_to(ROOT / "server" / under)
        for name in imported(path)
        if any(f"{name}.".startswith(f"{package}.") for package in packages)
    }


def test_the_files_of_the_server_are_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in FILES}
    assert {"server/__main__.py", "server/engine/session.py", "server/rpc/server.py"} <= names
    assert importers("grpc", under="rpc")


@pytest.mark.parametrize("package", sorted(MAKERS))
def test_the_server_imports_nothing_that_makes_models_or_asks_for_answers(package: str) -> None:
    assert importers(package) == set()


@pytest.mark.parametrize("package", ["grpc", "grpc_status", "google", "protos", "server.rpc"])
def test_the_engine_knows_no_grpc_and_no_protobuf(package: str) -> None:
    assert importers(package, under="engine") == set()


def test_only_the_session_imports_the_runtime() -> None:
    assert importers("onnxruntime") == {"server/engine/session.py"}


def test_a_server_process_loads_no_pytorch() -> None:
    code = "import sys, server.__main__; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(found.stdout.split())
    assert {"onnxruntime", "grpc", "artifact"} <= modules
    assert modules & MAKERS == set()


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == server.VERSION
