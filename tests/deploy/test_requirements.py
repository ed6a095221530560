"""The lock files of the images: complete, pinned by hash, and what the projects ask for."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lock_requirements import CLIENT, FOLDER, ROOT, SERVICE, SOURCES

PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)((?: ;[^\\]*)?)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
EXTRA = "--extra="


def pins(name: str) -> dict[str, str]:
    """The version of each package of a lock file, by its normalised name."""
    return pins_of(FOLDER / f"{name}.txt")


def pins_of(path: Path) -> dict[str, str]:
    return {canonicalize_name(found[1]): found[2] for found in PIN.finditer(path.read_text())}


def project(path: str) -> dict[str, Any]:
    document: dict[str, Any] = tomllib.loads((ROOT / path).read_text())["project"]
    return document


def asked_for(name: str) -> list[Requirement]:
    """What the projects of a lock file ask for directly, with its extras."""
    sources = SOURCES[name]
    extras = {source.removeprefix(EXTRA) for source in sources if source.startswith(EXTRA)}
    found: list[str] = []
    for path in {SERVICE, CLIENT} & set(sources):
        content = project(path)
        found += content["dependencies"]
        for extra in extras & content["optional-dependencies"].keys():
            found += content["optional-dependencies"][extra]
    return [Requirement(text) for text in found]


def test_every_lock_file_has_its_sources() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == SOURCES.keys() | {"overrides"}


@pytest.mark.parametrize("name", SOURCES)
def test_every_package_has_a_version_and_a_hash(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    entries = re.split(r"\n(?=\S)", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).strip())
    assert len(entries) == len(pins(name)) > 0
    assert [entry for entry in entries if not HASH.search(entry)] == []


@pytest.mark.parametrize("name", ["server", "server-cuda", "exporter", "client", "enrich"])
def test_a_lock_file_has_what_the_projects_ask_for(name: str) -> None:
    locked, asked = pins(name), asked_for(name)
    assert asked
    wrong = [
        str(requirement)
        for requirement in asked
        if not requirement.specifier.contains(
            locked.get(canonicalize_name(requirement.name), "0"), prereleases=True
        )
    ]
    assert wrong == [], "run `make lock`"


@pytest.mark.parametrize("name", SOURCES)
def test_a_lock_file_has_the_versions_of_the_constraints(name: str) -> None:
    constraints, locked = pins_of(ROOT / "constraints.txt"), pins(name)
    constraints["torch"] += "+cpu"
    assert {each: constraints.get(each, version) for each, version in locked.items()} == locked, (
        "run `make lock`"
    )


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_a_file_names_neither_hosts_nor_folders(path: Path) -> None:
    assert re.findall(r"https?://|file:|--(?:extra-)?index-url|--find-links|^/", path.read_text()) == []


def test_the_serving_image_has_no_pytorch_and_no_client_of_a_hub() -> None:
    assert {"torch", "onnx", "huggingface-hub", "sympy"} & pins("server").keys() == set()
    assert "onnxruntime" in pins("server")
    assert "onnxruntime-gpu" in pins("server-cuda")
    assert "onnxruntime" not in pins("server-cuda")
