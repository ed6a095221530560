"""The lock files of the images: pinned by hash, with the versions that the project uses."""

import re
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from scripts.lock_requirements import FOLDER, ROOT, SOURCES

PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)((?: ;[^\\]*)?)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def pins(name: str, folder: Path = FOLDER) -> dict[str, str]:
    """The version of each package of a lock file, by its normalised name."""
    text = (folder / f"{name}.txt").read_text()
    return {canonicalize_name(package): version for package, version, _ in PIN.findall(text)}


@pytest.mark.parametrize("name", SOURCES)
def test_every_package_has_a_version_and_a_hash_and_no_host(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    entries = re.split(r"\n(?=\S)", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).strip())
    assert len(entries) == len(pins(name)) > 0
    assert [entry for entry in entries if not HASH.search(entry)] == []
    assert re.findall(r"https?://|file:|--(?:extra-)?index-url|--find-links|^/", text) == []


@pytest.mark.parametrize("name", SOURCES)
def test_a_lock_file_has_the_versions_of_the_constraints(name: str) -> None:
    constraints, locked = pins("constraints", ROOT), pins(name)
    constraints["torch"] += "+cpu"
    assert locked.items() <= {**locked, **constraints}.items(), "run `make lock`"


def test_the_serving_image_has_one_runtime_and_no_pytorch() -> None:
    assert {"torch", "onnx", "huggingface-hub", "sympy"} & pins("server").keys() == set()
    assert {"torch", "triton", "nvidia-cudnn-cu13", "cuda-bindings"} & pins("exporter").keys() == set()
    assert "onnxruntime" in pins("server")
    assert "onnxruntime-gpu" in pins("server-cuda")
    assert "onnxruntime" not in pins("server-cuda")
