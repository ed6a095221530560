"""Command line: `python -m export.verify ARTIFACT --public-key FILE` checks a certificate without a server.

Exit status: 0 if the certificate and every file are good, 1 if not, 2 if the command was used wrongly.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from artifact.certificate import check_certificate
from artifact.errors import ArtifactError
from artifact.keys import KeyFileError, read_public_keys
from artifact.manifest import Manifest
from export.proof_text import describe

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)
console = Console(highlight=False, markup=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
USAGE_ERROR, FAILURE = 2, 1


@app.command()
def verify(
    artifact: Annotated[
        Path,
        typer.Argument(help="Folder of the artifact, NAME/VERSION in its repository.", show_default=False),
    ],
    *,
    public_key: Annotated[
        Path,
        typer.Option(help="PEM file with one or several trusted Ed25519 public keys.", show_default=False),
    ],
) -> None:
    """Check the certificate of an artifact and the hashes of its files, and print what was proven."""
    try:
        keys = read_public_keys(public_key)
    except KeyFileError as error:
        errors.print(f"error: --public-key {error}")
        raise typer.Exit(USAGE_ERROR) from None
    try:
        manifest = Manifest.load(artifact)
        found = check_certificate(artifact, manifest, keys)
        manifest.verify_files(artifact)
    except ArtifactError as error:
        errors.print(f"error: {error}")
        raise typer.Exit(FAILURE) from None
    console.print(f"{artifact}")
    for line in describe(found):
        console.print(f"  {line}")


if __name__ == "__main__":
    app(prog_name="python -m export.verify")
