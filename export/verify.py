"""Command line: `python -m export.verify ARTIFACT --public-key FILE` checks a certificate without a server.

Exit status: 0 if the certificate and every file are good, 1 if not, 2 if the command was used wrongly.
"""

from pathlib import Path
from typing import Annotated

import typer

from attention_serving.artifact.certificate import check_certificate
from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.keys import KeyFileError, read_public_keys
from attention_serving.artifact.manifest import Manifest
from attention_serving.export.proof_command import FAILURE, USAGE_ERROR, ArtifactFolder, fail, make_app, show

app = make_app()


@app.command()
def verify(
    artifact: ArtifactFolder,
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
        fail(f"--public-key {error}", USAGE_ERROR)
    try:
        manifest = Manifest.load(artifact)
        found = check_certificate(artifact, manifest, keys)
        manifest.verify_files(artifact)
    except ArtifactError as error:
        fail(str(error), FAILURE)
    show(artifact, found)


if __name__ == "__main__":
    app()
