"""The command `prove`: judges a server of embeddings, scores or modules, and writes reports."""

import inspect
import json
import os
from collections.abc import Mapping
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_client import AttentionClient, AttentionClientError
from attention_client._commands.session import TOKEN, option, parameters_of, secure_options, set_parameters
from attention_client._connection.tls import tls_files
from attention_client._prove.judge import judge
from attention_client._prove.library import Library
from attention_client._prove.servers import Cohere, Form, Grpc, NotJudgedError, OpenAI, RefusedError, Server, Tei

SERVER, MODEL, OUTPUT = "Server", "Model", "Output"
HTTP = {"openai": OpenAI, "tei": Tei, "cohere": Cohere}
NOT_JUDGED = 2
Url = Annotated[str, option(metavar="URL", panel=SERVER)]


def prove(  # noqa: PLR0913 - one parameter is one option
    folder: Path | None,
    *,
    openai: Url = "",
    tei: Url = "",
    cohere: Url = "",
    grpc: Annotated[str, option(metavar="HOST:PORT", panel=SERVER)] = "",
    timeout: Annotated[float, option(metavar="SECONDS", panel=SERVER, min=0.001)] = 60.0,
    model: Annotated[str, option(metavar="NAME", panel=MODEL)] = "",
    artifact: Annotated[
        Path | None, option(metavar="FOLDER", panel=MODEL, exists=True, file_okay=False)
    ] = None,
    tolerance: Annotated[float, option(metavar="NUMBER", panel=MODEL, min=0)] = 5e-5,
    report: Annotated[Path | None, option(metavar="FOLDER", panel=OUTPUT, file_okay=False)] = None,
    as_json: Annotated[bool, option("--json", panel=OUTPUT)] = False,
    **connection: Any,
) -> None:
    """Compare a server's embeddings or scores with those of sentence-transformers on this machine.

    Exit codes: 0 equal, 1 not equal, 2 not judged, or wrong usage.

    Options:
        openai: Base URL of OpenAI's API, as its clients take it: http://HOST:PORT/v1.
        tei: URL of the API of text-embeddings-inference.
        cohere: URL of Cohere's API, without a version.
        grpc: A server of attention.v1; with --artifact, of the Open Inference Protocol.
        timeout: Longest time that a request may take, in seconds, above 0. Default: 60.
        model: Name of the model on the server. Default: the only one, or the first.
        artifact: In place of MODEL_FOLDER, an artifact, whose golden vectors are replayed.
        tolerance: Largest difference of an element x is this number times (1 + 2|x|). Default: 5e-5.
        report: Write prove.json and prove.md to this folder.
        as_json: Print JSON rather than Markdown.
    """
    urls = {
        kind: url
        for kind, url in {"openai": openai, "tei": tei, "cohere": cohere, "grpc": grpc}.items()
        if url
    }
    if len(urls) != 1:
        raise typer.BadParameter("name one server: --openai, --tei, --cohere or --grpc")
    if (folder is None) == (artifact is None) or (artifact and not grpc):
        raise typer.BadParameter("name MODEL_FOLDER, or --artifact with --grpc")
    token = connection["token"] or os.environ.get(TOKEN) or ""
    files = [connection[name] for name in ("ca", "certificate", "private_key")]
    ((kind, url),) = urls.items()
    try:
        credentials = tls_files(*files, tls=bool(connection["tls"]))
        settings: dict[str, Any] = {"credentials": credentials, "token": token or None, "timeout": timeout}
        with AttentionClient(grpc or "unused:1", wait_for_ready=False, **settings) as client:
            if artifact:
                from attention_client._prove.golden import replay  # noqa: PLC0415 - excludes tritonclient

                result = replay(client, artifact, model, timeout)
            elif folder:
                library = Library(folder)
                form = Form(library.normalised, library.activation == "Identity", library.labels)
                server: Server = Grpc(client, model)
                if not grpc:
                    server = HTTP[kind](url, model=model, key=token, timeout=timeout, form=form)
                result = judge(server, library, tolerance)
    except ModuleNotFoundError as error:
        result = _refuse(f"{error}; install attention-client with its extra 'prove'")
    except (AttentionClientError, NotJudgedError, RefusedError, OSError, ValueError) as error:
        result = _refuse(f"{url}: {error}")
    if report:
        report.mkdir(parents=True, exist_ok=True)
        (report / "prove.json").write_text(json.dumps(result, indent=2) + "\n")
        (report / "prove.md").write_text(_markdown(result))
    typer.echo(json.dumps(result) if as_json else _markdown(result), nl=as_json)
    raise typer.Exit(result["status"])


def command() -> Any:
    """The command as typer reads it: a folder, the options above, and those of a connection."""

    def run(**values: Any) -> None:
        prove(values.pop("folder"), **values)

    argument = typer.Argument(
        metavar="MODEL_FOLDER",
        exists=True,
        file_okay=False,
        show_default=False,
        help="Folder of sentence-transformers.",
    )
    folder = Parameter(
        "folder", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, argument]
    )
    set_parameters(run, [folder, *parameters_of(prove), *secure_options(SERVER)])
    run.__doc__ = inspect.cleandoc(prove.__doc__ or "").partition("\n\nOptions:")[0]
    return run


def _refuse(message: str) -> dict[str, Any]:
    return {"verdict": f"not judged: {' '.join(message.split())}", "status": NOT_JUDGED}


def _markdown(report: Mapping[str, Any]) -> str:
    """The report: its verdict, a table of its figures, and a table for each part."""
    lines = ["# attention-client prove", "", report["verdict"]]
    parts = {name: value for name, value in report.items() if name not in ("verdict", "status")}
    figures = {name: value for name, value in parts.items() if not isinstance(value, dict | list)}
    tables = {name: value for name, value in parts.items() if name not in figures and value}
    for title, table in ({"figures": figures, **tables} if figures else {}).items():
        rows = table.items() if isinstance(table, dict) else enumerate(table, 1)
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", "| | |", "|---|---|"]
        lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(entry)}" for name, entry in value.items())
    text = f"{value:.7g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())
