"""Pins the packages of the images by version and hash: `python -m scripts.lock_requirements [NAME]…`.

Writes deploy/requirements/NAME.txt, with the program uv, for this pyproject.toml and the client's, with the
versions of constraints.txt. uv keeps the other versions that a file holds already, unless --upgrade is given.
PyTorch has its own file, for which uv must reach PyTorch's index: no other index has the builds for CPUs.
"""

import argparse
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy/requirements"
SERVICE, CLIENT = "pyproject.toml", "clients/python/pyproject.toml"
WITHOUT_HUB = "--override=deploy/requirements/overrides.txt"
# What each file is made from: projects with their extras, or files of requirements.
SOURCES: dict[str, tuple[str, ...]] = {
    "server": (SERVICE, "--extra=cpu", WITHOUT_HUB),
    "server-cuda": (SERVICE, "--extra=gpu", WITHOUT_HUB),
    "exporter": (SERVICE, "--extra=cpu", "--extra=encoders", "--no-emit-package=torch"),
    "client": (CLIENT, "--extra=cli"),
    "enrich": (SERVICE, CLIENT, "--extra=cpu", "--extra=enrich", WITHOUT_HUB),
    "build": ("deploy/requirements/build.in",),
    "sbom": ("deploy/requirements/sbom.in",),
    "torch": ("deploy/requirements/torch.in", "--torch-backend=cpu", "--no-deps"),
}
OPTIONS = (
    "--quiet --generate-hashes --no-annotate --python-version=3.13 "
    "--python-platform=linux --constraint=constraints.txt"
)


def main() -> None:
    """Writes the files that the command line names; all of them if it names none."""
    parser = argparse.ArgumentParser(description="Pin the packages of the images by version and hash.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(SOURCES)}; default: all")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that are allowed")
    options = parser.parse_args()
    unknown = set(options.names) - SOURCES.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(SOURCES)}")
    if shutil.which("uv") is None:
        parser.error("uv is not installed; `pip install uv` in an environment on the PATH installs it")
    for name in options.names or SOURCES:
        lock(name, upgrade=options.upgrade)


def lock(name: str, *, upgrade: bool = False) -> None:
    """Writes one file.

    Raises:
        CalledProcessError: uv did not find versions that fit together; it says why.
    """
    print(f"deploy/requirements/{name}.txt", flush=True)
    command = ["uv", "pip", "compile", *OPTIONS.split()]
    command += ["--custom-compile-command=make lock", *(["--upgrade"] if upgrade else [])]
    command += [*SOURCES[name], f"--output-file={FOLDER / f'{name}.txt'}"]
    subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 - fixed arguments


if __name__ == "__main__":
    main()
