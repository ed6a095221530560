"""Builds the wheels, and runs them in an environment without this checkout: `python -m scripts.check_wheels`.

The demo and examples/own_module run there with the oldest version of each direct dependency that
pyproject.toml accepts, and again with those of constraints.txt. PyTorch has its pinned version in both.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("cpu", "export", "enrich")
COMMANDS = ("attention-server", "attention-export", "attention-enrich", "attention-client")


def check(folder: Path) -> None:
    """Runs all checks in an empty folder; the first that fails ends the program."""
    for project in (ROOT, ROOT / "clients/python"):
        _run(sys.executable, "-m", "build", "--outdir", folder / "dist", project)
    _run(sys.executable, "-m", "venv", folder / "env")
    programs = folder / "env/bin"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copytree(ROOT / "examples/own_module", folder / "own_module")
    (folder / "oldest.txt").write_text("\n".join(oldest()))
    client, serving = sorted((folder / "dist").glob("attention_*.whl"))
    wheels = [f"{serving}[{','.join(EXTRAS)}]", f"{client}[cli,enrich]"]
    for constraints in (folder / "oldest.txt", ROOT / "constraints.txt"):
        print(f"\nwith {constraints.name}", flush=True)
        _run(programs / "pip", "install", "--quiet", "--no-compile", "--constraint", constraints, *wheels)
        for command in COMMANDS:
            _run(programs / command, "--help", stdout=subprocess.DEVNULL)
        _run(programs / "python", folder / "own_module/main.py")
        repository = folder / constraints.stem
        _run(programs / "python", "-m", "scripts.demo", "--repository", repository, cwd=folder)


def oldest() -> list[str]:
    """Constraints to the lower bounds of the wheel's requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    constraints = {}
    for requirement in map(Requirement, requirements):
        (lowest,) = (bound.version for bound in requirement.specifier if bound.operator == ">=")
        constraints[requirement.name] = f"{requirement.name}=={lowest}"
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints["torch"] = next(line for line in pinned if line.startswith("torch=="))
    return list(constraints.values())


def _run(*command: object, cwd: Path | None = None, stdout: int | None = None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = list(map(str, command))
    subprocess.run(arguments, cwd=cwd, stdout=stdout, env=environment, check=True)  # noqa: S603 - own programs


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        check(Path(empty))
