"""The command `prove`: judges a server of embeddings, scores or modules, and writes reports."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_client._commands.session import Session, option
from attention_client._prove.library import Library
from attention_client._prove.servers import GrpcServer, HttpServer, Server

SERVER, OPTIONS = "Server: one of them", "Options"
NOT_JUDGED = 2
Url = Annotated[str, option(metavar="URL", panel=SERVER)]
Folder = Annotated[Path | None, option(metavar="FOLDER", panel=OPTIONS, file_okay=False)]


def prove(
    session: Session,
    *,
    folder: Annotated[
        Path | None, typer.Argument(metavar="MODEL_FOLDER", exists=True, file_okay=False, show_default=False)
    ] = None,
    openai: Url = "",
    tei: Url = "",
    cohere: Url = "",
    grpc: Annotated[str, option(metavar="HOST:PORT", panel=SERVER)] = "",
    model: Annotated[str, option(metavar="NAME", panel=OPTIONS)] = "",
    artifact: Folder = None,
    tolerance: Annotated[float, option(metavar="NUMBER", panel=OPTIONS, min=0)] = 5e-5,
    report: Folder = None,
) -> None:
    """Compare a server's embeddings or scores with those of sentence-transformers on this machine.

    Exit codes: 0 equal, 1 not equal, 2 not judged, or wrong usage.

    Options:
        folder: Folder of the model, as sentence-transformers or transformers save it.
        openai: Base URL of OpenAI's API, as its clients take it: http://HOST:PORT/v1.
        tei: URL of the API of text-embeddings-inference.
        cohere: URL of Cohere's API, without a version.
        grpc: A server of attention.v1; with --artifact, of the Open Inference Protocol.
        model: Name of the model on the server. Default: the only one, or the first.
        artifact: In place of MODEL_FOLDER: an artifact, whose golden vectors are replayed.
        tolerance: The largest allowed difference of a number x is this times (1 + 2|x|). Default: 5e-5.
        report: Write prove.json and prove.md to this folder.
    """
    urls = {
        kind: url
        for kind, url in {"openai": openai, "tei": tei, "cohere": cohere, "grpc": grpc}.items()
        if url
    }
    if len(urls) != 1 or (folder is None) == (artifact is None) or (artifact and not grpc):
        raise typer.BadParameter("name MODEL_FOLDER and one server, or --artifact and --grpc")
    ((kind, url),) = urls.items()
    try:
        if artifact:
            from attention_client._prove.golden import replay  # noqa: PLC0415 - excludes tritonclient

            result = replay(session.client, artifact, model, session.timeout)
        elif folder:
            from attention_client._prove.judge import Judge  # noqa: PLC0415 - reads the texts

            library = Library(folder)
            server: Server = GrpcServer(session.client, model, library)
            if not grpc:
                server = HttpServer(kind, url, model, session.token, session.timeout, library)
            result = Judge(server, library, tolerance).report
    except ModuleNotFoundError as error:
        result = _refuse(f"{error}; install attention-client with its extra 'prove'")
    except Exception as error:  # any other exit code would be a verdict
        result = _refuse(f"{url}: {type(error).__name__}: {error}")
    if report:
        report.mkdir(parents=True, exist_ok=True)
        (report / "prove.json").write_text(json.dumps(result, indent=2) + "\n")
        (report / "prove.md").write_text(_markdown(result))
    typer.echo(json.dumps(result) if session.json else _markdown(result), nl=session.json)
    raise typer.Exit(result["status"])


def _refuse(message: str) -> dict[str, Any]:
    return {"status": NOT_JUDGED, "verdict": f"not judged: {' '.join(message.split())}"}


def _markdown(report: Mapping[str, Any]) -> str:
    """The verdict, and a list of the figures."""
    lines = [f"# {report['verdict']}", ""]
    for name, value in report.items():
        if isinstance(value, dict):
            lines += [f"- {name}", *(f"  - {key}: {entry}" for key, entry in value.items())]
        elif name != "verdict":
            lines.append(f"- {name}: {', '.join(value) if isinstance(value, list) else value}")
    return "\n".join(lines) + "\n"
