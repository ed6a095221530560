"""Command line: `python -m server.tokens create|list|revoke`, which edits the file of --tokens."""

import fcntl
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from attention_serving.artifact.locks import lock
from attention_serving.server.errors import ServerError
from attention_serving.server.security import token_file
from attention_serving.server.security.token_file import Entry, TokenFile

# 256 bits of the operating system's random numbers.
TOKEN_BYTES = 32
application = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Create, list and revoke the tokens of a server. A running server takes a change within seconds.",
)
FILE_HELP = "Tokens file, in JSON, as the server's --tokens names it."
RIGHT_HELP = (
    "infer:PATTERN, read, read:PATTERN or admin. PATTERN matches names of models as a shell does, such as "
    "multi-head-*. Can be repeated."
)
CERTIFICATE_HELP = "Name in a client certificate, instead of a token."
MAX_CALLS_HELP = "Most inference calls in progress. 0 sets no limit."
MAX_BYTES_HELP = "Most memory of its requests, such as 64MiB. 0 sets no limit."
WEIGHT_HELP = "Weight of its requests in the queue, relative to those of other identities."
REPLACE_HELP = (
    "Replace an identity of this name, whose token is then refused; without it, the name must be new."
)
File = Annotated[Path, typer.Option("--file", metavar="FILE", help=FILE_HELP, envvar="ATTENTION_TOKENS")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the identity.")]


@application.command()
def create(
    name: Name,
    file: File,
    rights: Annotated[list[str], typer.Option("--right", metavar="RIGHT", help=RIGHT_HELP)],
    days: Annotated[float, typer.Option(min=0, max=36500, help="Days until it expires. 0 sets no end.")] = 90,
    certificate: Annotated[str | None, typer.Option(metavar="NAME", help=CERTIFICATE_HELP)] = None,
    max_calls: Annotated[int, typer.Option(min=0, help=MAX_CALLS_HELP)] = 0,
    max_bytes: Annotated[str, typer.Option(metavar="SIZE", help=MAX_BYTES_HELP)] = "0",
    queue_weight: Annotated[float, typer.Option(min=0.001, max=1000, help=WEIGHT_HELP)] = 1.0,
    *,
    replace: Annotated[bool, typer.Option("--replace", help=REPLACE_HELP)] = False,
) -> None:
    """Add an identity. Prints its token, which is stored nowhere and cannot be shown again."""
    token = None if certificate else secrets.token_urlsafe(TOKEN_BYTES)
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days) if days else None
    fields = {
        "name": name,
        "sha256": token and token_file.digest_of(token).hex(),
        "certificate": certificate,
        "expires": expires,
        "rights": rights,
        "max_calls": max_calls,
        "max_bytes": max_bytes,
        "queue_weight": queue_weight,
    }
    with _errors(), _locked(file):
        content = token_file.read_file(file) if file.exists() else TokenFile(identities=())
        kept = (entry for entry in content.identities if not (replace and entry.name == name))
        token_file.write_file(file, TokenFile(identities=(*kept, Entry.model_validate(fields))))
    until = "without end" if expires is None else f"until {expires.isoformat()}"
    typer.echo(f"{name}: {' '.join(rights)}, {until}", err=True)
    if token is not None:
        typer.echo(token)


@application.command("list")
def list_identities(file: File) -> None:
    """Print the names, rights and ends of all identities."""
    rows = [("NAME", "BY", "EXPIRES", "RIGHTS")]
    with _errors():
        for entry in token_file.read_file(file).identities:
            proof, expires = f"certificate {entry.certificate}" if entry.certificate else "token", "never"
            if entry.expires is not None:
                expires = entry.expires.isoformat() + " (expired)" * (entry.expires <= datetime.now(UTC))
            rows.append((entry.name, proof, expires, " ".join(entry.rights)))
    for name, proof, expires, granted in rows:
        typer.echo(f"{name:24}  {proof:24}  {expires:25}  {granted}")


@application.command()
def revoke(name: Name, file: File) -> None:
    """Remove an identity. Its calls are refused from now on, and its streams end with their next message."""
    with _errors(), _locked(file):
        content = token_file.read_file(file)
        kept = [entry for entry in content.identities if entry.name != name]
        if len(kept) == len(content.identities):
            names = ", ".join(entry.name for entry in content.identities) or "none"
            raise ServerError(f"{file}: {name} does not exist; there are: {names}")
        token_file.write_file(file, TokenFile(identities=tuple(kept)))
    typer.echo(f"{name}: revoked", err=True)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lets one command at a time change the files of a folder."""
    try:
        with lock(file.parent, fcntl.LOCK_EX):
            yield
    except OSError as error:
        raise ServerError(f"{file.parent}: cannot be opened: {error.strerror}") from error


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (ServerError, ValidationError) as error:
        message = token_file.problems(error) if isinstance(error, ValidationError) else error
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    application()
