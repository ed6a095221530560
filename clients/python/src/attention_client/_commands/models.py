"""Commands that inspect a server: models, describe, health."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from attention_client._commands.session import Session, complete_model
from attention_client._commands.tables import description, print_json, print_models

_NAME: dict[str, Any] = {"metavar": "NAME", "help": "Name of the model.", "autocompletion": complete_model}
ModelName = Annotated[str, typer.Option("--model", **_NAME)]
ModelVersion = Annotated[
    str,
    typer.Option(
        "--version",
        metavar="N",
        help="Version of the model. Default: the highest that is ready.",
        show_default=False,
    ),
]


def models(session: Session) -> None:
    """List the server's models."""
    found = session.client.models()
    if session.json:
        print_json([asdict(model) for model in found])
    else:
        print_models(found)


def describe(
    session: Session,
    *,
    name: Annotated[str | None, typer.Argument(**_NAME, show_default=False)] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", **_NAME | {"help": "The name, in place of NAME."}, show_default=False),
    ] = None,
    version: ModelVersion = "",
) -> None:
    """Print all that the server states about a model."""
    given = name or model
    if given is None or (name and model):
        raise typer.BadParameter("give the name of one model: describe NAME", param_hint="NAME")
    found = session.client.model(given, version)
    if session.json:
        print_json(asdict(found))
    else:
        typer.echo(description(found), nl=False)


def health(session: Session) -> None:
    """Report whether the server is ready; exit code 1 if it is not. With --wait, wait until it is."""
    if session.waits:
        session.client.wait_until_ready()
    ready = session.client.is_ready()
    if session.json:
        print_json({"ready": ready})
    else:
        typer.echo("ready" if ready else "not ready")
    if not ready:
        raise typer.Exit(1)
