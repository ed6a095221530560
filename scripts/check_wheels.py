"""Builds the wheels, and runs them in an environment without this checkout: `python -m scripts.check_wheels`.

The demo and examples/own_module run there with the oldest version of each direct dependency that
pyproject.toml accepts, and again with those of constraints.txt. PyTorch has its pinned version in both.
`--python python3.13 --without-pytorch` checks the server, the client and enrichment on another Python: with the
versions of constraints.txt they serve an artifact that this Python exported.
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
EXTRAS = ("cpu", "export", "enrich")
COMMANDS = ("attention-server", "attention-export", "attention-enrich", "attention-client")
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
    extras = EXTRAS if has_pytorch else tuple(extra for extra in EXTRAS if extra != "export")
    wheels = [f"{serving}[{','.join(extras)}]", f"{client}[cli,enrich]"]
    if not has_pytorch:
        _install(programs, ROOT / "constraints.txt", wheels)
        _run(sys.executable, "-m", "scripts.export_demo_models", "--repository", folder / "models", cwd=ROOT)
        _run(programs / "python", "-c", SERVE, cwd=folder)
        return
    for constraints in (folder / "oldest.txt", ROOT / "constraints.txt"):
        _install(programs, constraints, wheels)
        _run(programs / "python", folder / "own_module/main.py")
        repository = folder / constraints.stem
        _run(programs / "python", "-m", "scripts.demo", "--repository", repository, cwd=folder)


def _install(programs: Path, constraints: Path, wheels: list[str]) -> None:
    print(f"\nwith {constraints.name}", flush=True)
    _run(programs / "pip", "install", "--quiet", "--no-compile", "--constraint", constraints, *wheels)
    for command in COMMANDS:
        _run(programs / command, "--help", stdout=subprocess.DEVNULL)


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
    parser = argparse.ArgumentParser(description="Build the wheels and run them in an empty environment.")
    parser.add_argument("--python", default=sys.executable, help="the Python of the environment; default: this one")
    parser.add_argument("--without-pytorch", action="store_true", help="serve artifacts that this Python exports")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        check(Path(empty), options.python, has_pytorch=not options.without_pytorch)
