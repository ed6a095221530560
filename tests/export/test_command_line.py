"""`python -m export` in a process of its own."""

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from attention_serving.artifact.golden import load_golden
from attention_serving.artifact.manifest import Manifest
from attention_serving.export.signature import run_eager
from attention_serving.model.presets import PRESETS, build_preset
from tests.export.modules import signature

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "export", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def export(repository: Path, seed: int) -> "subprocess.CompletedProcess[str]":
    return run("self-attention", "--out", repository, "--name", "renamed", "--version", 3, "--seed", seed)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the model renamed, version 3, exported once with seed 7."""
    folder = tmp_path_factory.mktemp("parent") / "repository"
    done = export(folder, seed=7)
    assert done.returncode == 0, done.stderr
    assert str(folder / "renamed" / "3") in done.stdout
    return folder


def test_the_list_has_every_preset_at_the_start_of_a_line() -> None:
    done = run("--list")
    assert (done.returncode, done.stderr) == (0, "")
    first = {line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")}
    assert first == {"preset", *PRESETS}


def test_help_list_and_refusals_do_not_import_pytorch() -> None:
    """PyTorch takes seconds to import."""
    code = (
        "import sys, attention_serving.export.__main__ as main, attention_serving.export\n"
        "for arguments in (['--help'], ['--list'], ['-V'], ['self-attention'], ['x', '--out', 'y']):\n"
        "    try: main.app(arguments)\n"
        "    except SystemExit: pass\n"
        "assert callable(attention_serving.export.export_module)\n"
        "print(sorted({'torch', 'onnx', 'onnxruntime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_help_groups_the_options() -> None:
    done = run("--help")
    assert done.returncode == 0
    for group in ("What to export", "With --weights", "Destination", "Precision"):
        assert group in done.stdout


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    done = run("--tool-version")
    assert (done.returncode, done.stdout) == (0, project["version"] + "\n")


def test_a_preset_is_exported_under_the_name_version_and_seed_that_are_given(repository: Path) -> None:
    folder = repository / "renamed" / "3"
    manifest = Manifest.load(folder)
    manifest.verify_files(folder)
    assert (manifest.name, manifest.version) == ("renamed", 3)
    module = build_preset("self-attention", seed=7)
    for case in load_golden(folder / manifest.golden):
        eager = run_eager(module, signature(module, case.graph), case.inputs)
        for name, array in eager.items():
            np.testing.assert_allclose(case.outputs[name], array, rtol=1e-6, atol=1e-6)


def test_exporting_againin_another_process_changes_nothing(repository: Path) -> None:
    folder = repository / "renamed" / "3"
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    done = export(repository, seed=7)
    assert done.returncode == 0, done.stderr
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_another_seed_under_the_same_name_is_refused(repository: Path) -> None:
    done = export(repository, seed=8)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert (
        "holds another artifact; replace it (--replace), or choose another version: 4 is free" in done.stderr
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        pytest.param(
            ["no-such-preset", "--out", "REPOSITORY"], "'no-such-preset' does not exist", id="preset"
        ),
        pytest.param(["self-attention"], "--out is missing", id="no-repository"),
        pytest.param(["self-attention", "--out", "REPOSITORY", "--name", "a/b"], "name='a/b'", id="name"),
    ],
)
def test_a_wrong_usage_is_refused_in_one_line(arguments: list[str], part: str, tmp_path: Path) -> None:
    done = run(*(tmp_path if argument == "REPOSITORY" else argument for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert part in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        pytest.param("--version", "0", id="version-0"),
        pytest.param("--precision", "fp8", id="unknown-precision"),
        pytest.param("--atol", "-1", id="negative-tolerance"),
    ],
)
def test_a_value_outside_the_range_of_an_option_is_refused_by_option(
    option: str, value: str, tmp_path: Path
) -> None:
    done = run("self-attention", "--out", tmp_path, option, value)
    assert done.returncode == 2
    assert f"'{option}'" in done.stderr
    assert not list(tmp_path.iterdir())
