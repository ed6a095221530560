"""The package as it is installed and started."""

import subprocess
import sys
from pathlib import Path


def python(*arguments: str):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_it_imports_no_optional_package():
    optional = {"torch", "onnxruntime", "typer", "rich", "opentelemetry.trace"}
    done = python("-c", f"import sys, attention_client; print(*{optional} & set(sys.modules))")
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_it_runs_as_a_module_and_as_a_command():
    done = python("-m", "attention_client", "--help")
    assert done.returncode == 0
    assert "HOST:PORT" in done.stdout
    command = Path(sys.executable).parent / "attention-client"
    assert subprocess.check_output([command, "--version"], text=True).startswith("attention-client ")


def test_without_the_extra_the_command_names_it():
    hidden = "import sys; sys.modules['typer'] = None; from attention_client.cli import main; main()"
    done = python("-c", hidden)
    assert done.returncode == 1
    assert done.stderr == "error: attention-client needs typer: install it with its extra 'cli'\n"
