"""Command line: `python -m export.verify ARTIFACT --public-key FILE` checks a certificate without a server.

Exit status: 0 if the certificate and every file are good, 1 if not, 2 if the command was used wrongly.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

from attention_serving.artifact.certificate import Certificate, check_certificate
from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.keys import KeyFileError, read_public_keys
from attention_serving.artifact.manifest import Manifest

USAGE_ERROR, FAILURE = 2, 1
Command = TypeVar("Command", bound=Callable[..., None])
console = Console(highlight=False, markup=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def make_app(**options: Any) -> typer.Typer:
    """An application without commands, with further options of typer."""
    return typer.Typer(
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


def read_help(command: Command, **values: Any) -> Command:
    """Takes the help of each parameter of a command from its docstring, with values in the place of names."""
    description, _, entries = inspect.cleandoc(command.__doc__ or "").partition("\n\nOptions:\n")
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", entries, re.MULTILINE))
    for name, parameter in inspect.signature(command).parameters.items():
        text = " ".join(texts[name].split()).format(**values)
        if hasattr(parameter.annotation, "__metadata__"):
            parameter.annotation.__metadata__[0].help = text
        else:
            command.__annotations__[name] = Annotated[parameter.annotation, typer.Option(help=text)]
    command.__doc__ = description
    return command


app = make_app(add_completion=False)


@app.command()
@read_help
def verify(artifact: Annotated[Path, typer.Argument()], *, public_key: Path) -> None:
    """Check the certificate of an artifact and the hashes of its files, and print what was proven.

    Options:
        artifact: Folder of the artifact, NAME/VERSION in its repository.
        public_key: PEM file with one or several trusted Ed25519 public keys.
    """
    try:
        keys = read_public_keys(public_key)
    except KeyFileError as error:
        fail(f"--public-key {error}")
    try:
        manifest = Manifest.load(artifact)
        certificate = check_certificate(artifact, manifest, keys)
        manifest.verify_files(artifact)
    except ArtifactError as error:
        fail(str(error), FAILURE)
    show(artifact, certificate)


def fail(message: str, status: int = USAGE_ERROR) -> NoReturn:
    """Prints an error and ends the command with a status."""
    errors.print(f"error: {message}")
    raise typer.Exit(status)


def show(path: Path, certificate: Certificate) -> None:
    """Prints a path, and below it what the certificate states."""
    proof, machine = certificate.proof, certificate.proof.machine
    console.print(
        f"{path}",
        f"  {proof.name} version {proof.version}, {proof.precision}, {certificate.files} files",
        f"  largest difference from {proof.judge} {proof.max_abs_error:.2g} in {proof.cases} cases, "
        f"{proof.max_error_ratio:.2g} of the tolerance "
        f"{proof.tolerance.atol:g} + {proof.tolerance.rtol:g} x |value|",
        f"  replayed on {machine.provider}, {machine.cpu}, {machine.architecture}, {machine.system}",
        f"  replayed with {_list_versions(proof.replayed_with)}",
        f"  made with {_list_versions(proof.made_with)}",
        f"  signed with key {certificate.key}",
        sep="\n",
    )


def _list_versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


if __name__ == "__main__":
    app()
