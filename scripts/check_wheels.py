"""Builds the wheels, and runs them in an environment without this checkout: `python -m scripts.check_wheels`.

The demo and examples/own_module run there with the oldest version of each direct dependency that
pyproject.toml accepts, and again with those of constraints.txt. PyTorch has its pinned version in both.
`--python python3.13` runs them with another Python, for which the oldest versions have no wheels, and
`--without-pytorch` checks the server, the client and enrichment only: they serve what this Python exported.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"cpu", "export", "enrich"}
# The commands, with the option that prints their version.
COMMANDS = {
    "attention-server": "--version",
    "attention-client": "--version",
    "attention-enrich": "--tool-version",
    "attention-export": "--tool-version",
}
# Enriches a table on a server and in process, where PyTorch is not installed.
SERVE = """
import importlib.util
import numpy, pyarrow
from pathlib import Path
from attention_serving.enrich import enrich
from scripts.local_server import serving

assert importlib.util.find_spec("torch") is None
job = {"model": "multi-head-768x12", "column": "c"}
table = pyarrow.table({"c": [numpy.ones((length, 768), numpy.float32).tolist() for length in (6, 1, 33)]})
with serving(Path("models"), Path("log")) as server:
    results = [enrich(table, servers=[server.target], **job), enrich(table, model_repository="models", **job)]
served, computed = (numpy.concatenate(result.table["context_vectors"].to_pylist()) for result in results)
print(served.shape, "largest difference", abs(served - computed).max())
assert abs(served - computed).max() < 1e-5
"""


def check(folder: Path, python: str, *, has_pytorch: bool) -> None:
    """Runs all checks in an empty folder; the first that fails ends the program."""
    for project in (ROOT, ROOT / "clients/python"):
        _run(sys.executable, "-m", "build", "--outdir", folder / "dist", project)
    _run(python, "-m", "venv", folder / "env")
    programs = folder / "env/bin"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copytree(ROOT / "examples/own_module", folder / "own_module")
    (folder / "oldest.txt").write_text("\n".join(oldest()))
    client, serving = sorted((folder / "dist").glob("attention_*.whl"))
    extras = ",".join(sorted(EXTRAS if has_pytorch else EXTRAS - {"export"}))
    wheels = [f"{serving}[{extras}]", f"{client}[cli,enrich]"]
    if not has_pytorch:
        _install(programs, ROOT / "constraints.txt", wheels)
        _run(sys.executable, "-m", "scripts.export_demo_models", "--repository", folder / "models", cwd=ROOT)
        _run(programs / "python", "-c", SERVE, cwd=folder)
        return
    pinned = ROOT / "constraints.txt"
    for constraints in (folder / "oldest.txt", pinned) if python == sys.executable else (pinned,):
        _install(programs, constraints, wheels)
        _run(programs / "python", folder / "own_module/main.py")
        repository = folder / constraints.stem
        _run(programs / "python", "-m", "scripts.demo", "--repository", repository, cwd=folder)


def _install(programs: Path, constraints: Path, wheels: list[str]) -> None:
    """Installs the wheels; every command then starts, and has the version of the wheels."""
    print(f"\nwith {constraints.name}", flush=True)
    _run(programs / "pip", "install", "--quiet", "--no-compile", "--constraint", constraints, *wheels)
    version = PROJECT["version"]
    for command, option in COMMANDS.items():
        if command != "attention-export" or "export" in wheels[0]:
            done = subprocess.run([programs / command, option], capture_output=True, text=True, check=True)  # noqa: S603
            if done.stdout.split()[-1] != version:
                raise RuntimeError(f"{command} {option}: {done.stdout.strip()}; the wheel has {version}")


def oldest() -> list[str]:
    """Constraints to the lower bounds of the wheel's requirements."""
    requirements = list(PROJECT["dependencies"])
    for extra in EXTRAS:
        requirements += PROJECT["optional-dependencies"][extra]
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
    parser = argparse.ArgumentParser(description="Build the wheels and run them in an empty environment.")
    parser.add_argument(
        "--python", default=sys.executable, help="the Python of the environment; default: this one"
    )
    parser.add_argument(
        "--without-pytorch", action="store_true", help="serve artifacts that this Python exports"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        check(Path(empty), options.python, has_pytorch=not options.without_pytorch)
