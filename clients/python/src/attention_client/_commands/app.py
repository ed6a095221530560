"""The command line `attention-client`: its list of commands, and those that inspect a server."""

from dataclasses import asdict
from typing import Annotated

import typer

from attention_client import __version__
from attention_client._commands import contexts
from attention_client._commands.compute import attend, embed, infer, rerank, text, tokens
from attention_client._commands.prove import prove
from attention_client._commands.session import ModelVersion, Session, add_command, add_options, option
from attention_client._commands.tables import description, print_json, print_models
from attention_client._commands.weights import weights
from attention_client.enrich.cli import command as enrich_command

app = typer.Typer(
    help="Compute context vectors on an attention server and inspect its models.",
    epilog="Exit codes: 0 success, 1 the call failed, 2 wrong usage.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:  # noqa: FBT001 - as typer calls it
    if requested:
        typer.echo(f"attention-client {__version__}")
        raise typer.Exit


def _root(
    *,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Compute context vectors on an attention server and inspect its models.

    Options:
        version: Print the client's version and exit.
    """


def models(session: Session) -> None:
    """List the server's models, their inputs, and which take texts."""
    infos = session.client.models()
    if session.json:
        print_json([asdict(info) for info in infos])
    else:
        print_models(infos)


def describe(
    session: Session,
    *,
    name: Annotated[str | None, typer.Argument(metavar="NAME", show_default=False)] = None,
    model: Annotated[str | None, option(metavar="NAME", panel="Options")] = None,
    version: ModelVersion = "",
) -> None:
    """Print all that the server states about a model, such as its inputs with the ids and lengths they take.

    Options:
        name: Name of the model.
        model: The name, in place of NAME.
    """
    if not (name or model) or (name and model):
        raise typer.BadParameter("give the name of one model: describe NAME", param_hint="NAME")
    info = session.client.model(name or model or "", version)
    if session.json:
        print_json(asdict(info))
    else:
        typer.echo(description(info), nl=False)


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


app.callback()(add_options(_root))
for _command in (attend, infer, embed, rerank, text, tokens, weights):
    add_command(app, _command, panel="Compute")
for _inspection in (models, describe, health, prove):
    add_command(app, _inspection, panel="Inspect")
app.add_typer(contexts.app, name="context", rich_help_panel="Inspect")
app.command("enrich", rich_help_panel="Tables")(enrich_command)
