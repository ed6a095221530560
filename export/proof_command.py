"""What the commands `export.sign` and `export.verify` share: their argument, and what they print."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NoReturn, TypeAlias

import typer
from rich.console import Console

from attention_serving.artifact.certificate import Certificate

USAGE_ERROR, FAILURE = 2, 1
ArtifactFolder: TypeAlias = Annotated[
    Path,
    typer.Argument(help="Folder of the artifact, NAME/VERSION in its repository.", show_default=False),
]
console = Console(highlight=False, markup=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def make_app() -> typer.Typer:
    """An application without commands."""
    return typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)


def fail(message: str, status: int) -> NoReturn:
    """Prints an error and ends the command with a status."""
    errors.print(f"error: {message}")
    raise typer.Exit(status)


def show(path: Path, certificate: Certificate) -> None:
    """Prints a path, and below it what the certificate states."""
    console.print(f"{path}")
    for line in describe(certificate):
        console.print(f"  {line}")


def describe(certificate: Certificate) -> Iterator[str]:
    """One line for each part: the artifact, the result, the place, the versions, the key."""
    proof, machine = certificate.proof, certificate.proof.machine
    yield f"{proof.name} version {proof.version}, {proof.precision}, {certificate.files} files"
    yield (
        f"largest difference from eager PyTorch {proof.max_abs_error:.2g} in {proof.cases} cases, "
        f"{proof.max_error_ratio:.2g} of the tolerance "
        f"{proof.tolerance.atol:g} + {proof.tolerance.rtol:g} x |value|"
    )
    yield f"replayed on {machine.provider}, {machine.cpu}, {machine.architecture}, {machine.system}"
    yield f"replayed with {_listed(proof.replayed_with)}"
    yield f"made with {_listed(proof.made_with)}"
    yield f"signed with key {certificate.key}"


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
