"""The package as it is installed and started."""

import subprocess
import sys
from pathlib import Path

import pytest

import attention_client


def python(*arguments: str):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def test_every_public_name_exists():
    for name in attention_client.__all__:
        assert hasattr(attention_client, name)


def test_imports_neither_torch_nor_onnxruntime_nor_typer():
    done = python(
        "-c",
        "import sys, attention_client; print(*{'torch', 'onnxruntime', 'typer', 'rich'} & set(sys.modules))",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "order", ["attention_client, tritonclient.grpc", "tritonclient.grpc, attention_client"]
)
def test_can_be_imported_beside_tritonclient(order: str):
    done = python("-c", f"import {order}")
    assert done.returncode == 0, done.stderr


def test_runs_as_a_module():
    done = python("-m", "attention_client", "--help")
    assert done.returncode == 0
    assert "HOST:PORT" in done.stdout


def test_the_installed_command_runs():
    command = Path(sys.executable).parent / "attention-client"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("attention-client ")


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_the_command_names_it(package: str):
    hidden = f"import sys; sys.modules['{package}'] = None; from attention_client.cli import main; main()"
    done = python("-c", hidden)
    assert done.returncode == 1
    assert done.stderr == f"error: attention-client needs {package}: install it with its extra 'cli'\n"
