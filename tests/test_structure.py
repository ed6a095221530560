"""Which part of the repository may import which: the arrows of the architecture, without a cycle.

model -> export -> artifact <- server.engine <- server.transport <- server.api -> protos <- clients

Names are those within attention_serving.
Imports are read from the syntax trees: those at any depth, and those for type checkers only.
"""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import attention_client
import pytest

from attention_serving import export, server
from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "clients/python/src"
# Folders of import packages, and the folder that their names are relative to.
OURS = ("model", "artifact", "export", "protos", "server", "scripts", "benchmarks", "tests")
PACKAGES = {**dict.fromkeys(OURS, ROOT), "enrich": ROOT / "clients", "attention_client": CLIENT}
# The packages of attention_serving.
PREFIX = "attention_serving."
PARTS = {"model", "artifact", "export", "protos", "server", "enrich"}
# What each part imports of the others. Tests import anything.
ALLOWED = {
    "model": set(),
    "artifact": set(),
    "protos": set(),
    "export": {"model", "artifact"},
    "server": {"artifact", "protos"},
    "attention_client": set(),
    "enrich": {"attention_client", "artifact", "server"},
}
# Libraries that a part does not import.
FORBIDDEN = {
    "model": "onnx onnxruntime onnxscript grpc google",
    "artifact": "torch onnx onnxruntime onnxscript grpc google",
    "export": "grpc google",
    "server": "torch onnx onnxscript",
    "server.observe": "grpc google onnxruntime protos server.process server.http",
    "server.engine": "grpc grpc_status google protos server.api server.transport server.process server.http"
    " server.observe opentelemetry",
    "server.api": "onnxruntime server.process server.http server.observe.traces",
    "server.transport": "protos server.api onnxruntime server.process server.http server.observe.traces",
    "server.security": "grpc google onnxruntime protos server.api server.transport server.process",
    "server.http": "onnxruntime server.process server.engine.engine",
    "protos": "torch onnxruntime",
    "attention_client": "onnxruntime",
}
# Packages with few importers: the part they are counted in, and the folders or files that may import them.
CONFINED = {
    "torch": (
        "attention_client",
        (
            "clients/python/src/attention_client/torch.py",
            "clients/python/src/attention_client/_prove/library.py",
        ),
    ),
    "grpc._cython": ("", ("server/transport/completion_queue.py", "benchmarks/")),
    "onnxruntime": ("server", ("server/engine/run/session.py", "server/engine/run/cuda.py")),
    "opentelemetry": ("server", ("server/observe/traces.py",)),
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the repository by its dotted name."""
    found = {}
    for folder, root in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str) -> frozenset[str]:
    """Dotted names of all that a module imports, within attention_serving; `from a import b` gives a.b."""
    return frozenset(target.removeprefix(PREFIX) for target in written(name))


def written(name: str) -> Iterator[str]:
    """The same as it is written."""
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, *packages: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def dependencies(name: str) -> set[str]:
    """The modules of the repository that a module imports."""
    # `from a import b` names a module, or an attribute of one.
    targets = (target if target in modules() else target.rpartition(".")[0] for target in imports(name))
    return (modules().keys() & set(targets)) - {name}


def importers(package: str, *, of: str = "") -> set[str]:
    """Files of a part that import a package or something in it."""
    return {
        str(path.relative_to(ROOT))
        for name, path in modules().items()
        if (not of or within(name, of)) and any(within(target, package) for target in imports(name))
    }


def test_every_module_is_found() -> None:
    expected = {"server.engine.run.session", "model", "enrich.__main__", "attention_client"}
    assert expected <= modules().keys()
    assert "server.engine.models.repository" in dependencies("server.process.application")
    assert importers("grpc", of="server.transport")


def test_parts_are_imported_from_attention_serving_only() -> None:
    for name in modules():
        assert not [target for target in written(name) if within(target, *PARTS, "clients")], name


def test_no_modules_import_each_other_in_a_cycle() -> None:
    graph = {name: dependencies(name) for name in modules()}
    TopologicalSorter(graph).prepare()  # raises an error that names a cycle


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_those_below_it(part: str) -> None:
    targets = {target for name in modules() if within(name, part) for target in dependencies(name)}
    assert {target.split(".")[0] for target in targets} <= ALLOWED[part] | {part}


@pytest.mark.parametrize("part", FORBIDDEN)
def test_a_part_does_not_import_some_packages(part: str) -> None:
    found = {package: importers(package, of=part) for package in FORBIDDEN[part].split()}
    assert {package: files for package, files in found.items() if files} == {}


@pytest.mark.parametrize("package", CONFINED)
def test_a_package_is_confined_to_few_files(package: str) -> None:
    part, allowed = CONFINED[package]
    found = importers(package, of=part)
    assert found
    assert {path for path in found if not path.startswith(allowed)} == set()


def loaded(modules: str) -> set[str]:
    """The packages that a process has loaded after the import of modules; of this project, the parts."""
    code = (
        f"import sys, {modules}\n"
        "print(*{name.removeprefix('attention_serving.').split('.')[0] for name in sys.modules})"
    )
    return set(run_python("-c", code).stdout.split())


def test_a_server_loads_no_pytorch_nor_opentelemetry_and_a_supervisor_neither_the_runtime_nor_grpc() -> None:
    found = loaded("attention_serving.server.__main__, attention_serving.server.process.application")
    found |= loaded("attention_serving.server.http.server")
    assert {"onnxruntime", "grpc", "artifact", "httptools"} <= found
    unused = {"torch", "onnx", "onnxscript", "model", "export", "attention_client", "tests", "opentelemetry"}
    assert found & unused == set()
    assert {"onnxruntime", "grpc"} & loaded("attention_serving.server.process.workers") == set()
    help_page = loaded("attention_serving.server.__main__")
    assert {"onnxruntime", "grpc", "numpy"} & help_page == set()


def test_all_programs_wheels_and_images_have_one_version() -> None:
    paths = ("pyproject.toml", "clients/python/pyproject.toml")
    service, client = (tomllib.loads((ROOT / path).read_text())["project"] for path in paths)
    image = re.search(r"^ARG VERSION=(.+)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    package = json.loads((ROOT / "clients/typescript/package.json").read_text())
    sources = {"client": client, "package": package, "image": {"version": image and image[1]}}
    assert service["name"] == server.NAME
    versions = {name: source["version"] for name, source in sources.items()}
    versions |= {"server": server.VERSION, "export": export.VERSION, "library": attention_client.__version__}
    assert versions == dict.fromkeys(versions, service["version"])
    page = (ROOT / "docs/your-own-project.md").read_text()
    assert set(re.findall(r"/attention_\w+-([\d.]+)-", page)) == {service["version"]}
    shown = run_python("-m", "clients.enrich", "--tool-version").stdout
    assert shown == f"attention-enrich {service['version']}\n"
