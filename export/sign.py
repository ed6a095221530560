"""Command line: `python -m export.sign ARTIFACT --key KEY.pem` proves an artifact here and signs the proof.

Exit status: 0 if the certificate was written, 1 if the artifact cannot be proven, 2 if the command was used
wrongly.
"""

from pathlib import Path
from typing import Annotated

import typer

from attention_serving.artifact.certificate import check_certificate
from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.keys import KeyFileError, read_private_key
from attention_serving.artifact.manifest import Manifest
from attention_serving.export.certificate import ProofProvider, sign_artifact
from attention_serving.export.errors import ExportError
from attention_serving.export.verify import FAILURE, fail, make_app, read_help, show

app = make_app(add_completion=False)


@app.command()
@read_help
def sign(
    artifact: Annotated[Path, typer.Argument()], *, key: Path, provider: ProofProvider = ProofProvider.CPU
) -> None:
    """Replay the golden vectors of an artifact on this machine, and sign a certificate of the result.

    The certificate is written into the artifact's folder, in place of one that is there.

    Options:
        artifact: Folder of the artifact, NAME/VERSION in its repository.
        key: PEM file with an Ed25519 private key.
        provider: Execution provider that replays the golden vectors.
    """
    try:
        private = read_private_key(key)
    except KeyFileError as error:
        fail(f"--key {error}")
    try:
        path = sign_artifact(artifact, private, provider)
        certificate = check_certificate(artifact, Manifest.load(artifact), [private.public_key])
    except (ArtifactError, ExportError, OSError) as error:
        fail(str(error), FAILURE)
    show(path, certificate)


if __name__ == "__main__":
    app()
