"""The commands `context put`, `context list` and `context drop`, for stored contexts."""

from typing import Annotated, Any

import typer

from attention_client import Context
from attention_client._commands.arrays import read_array
from attention_client._commands.compute import INPUTS, Array
from attention_client._commands.session import ModelVersion, Session, add_command, fail, option
from attention_client._commands.tables import print_json, table

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]
app = typer.Typer(help="Store keys and values on the server, for attend --context.", no_args_is_help=True)


def put(
    session: Session,
    *,
    model: Model,
    keys: Annotated[
        str, typer.Argument(metavar="KEYS", help="Key rows, (T, d), in a form that attend --query takes.")
    ],
    version: ModelVersion = "",
    value: Array = None,
    ttl: Annotated[int | None, option(metavar="SECONDS", panel=INPUTS, min=1)] = None,
    shared: Annotated[bool, option("--shared", panel=INPUTS)] = False,
) -> None:
    """Put key and value rows on the server, and print the id of the context.

    Options:
        value: Value rows, for models that separate them from the keys.
        ttl: Remove the context after this many seconds. Default: 3600.
        shared: Let callers with other identities use it.
    """
    key, values = read_array("KEYS", keys), None if value is None else read_array("--value", value)
    context = session.client.context(model, key, values, ttl=ttl, shared=shared, version=version)
    if session.json:
        print_json(_values(context))
    else:
        typer.echo(context.id)


def list_(session: Session, *, model: Model, version: ModelVersion = "") -> None:
    """List the contexts of a model that the caller may use, the last used first."""
    listing = [_values(context) for context in session.client.contexts(model, version)]
    if session.json:
        print_json(listing)
    else:
        rows = [["ID", "VERSION", "ROWS", "DOCUMENTS", "BYTES", "EXPIRES", "SHARED"]]
        rows += [[str(value) for name, value in values.items() if name != "model_name"] for values in listing]
        typer.echo(table(rows), nl=False)


def drop(
    session: Session,
    *,
    model: Model,
    context: Annotated[str, typer.Argument(metavar="ID", help="Id of the context.")],
    version: ModelVersion = "",
) -> None:
    """Remove a context from the server."""
    for stored in session.client.contexts(model, version):
        if stored.id == context:
            stored.drop()
            return
    fail(f"model {model} has no context {context}")


def _values(context: Context) -> dict[str, Any]:
    values = {name: value for name, value in vars(context).items() if not name.startswith("_")}
    return values | {"expires_at": context.expires_at.isoformat()}


for _command in (put, list_, drop):
    add_command(app, _command, panel="Commands")
