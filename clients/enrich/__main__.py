"""Command line: `python -m clients.enrich --help`.

Exit codes: 0 done, 1 no result (one line on stderr says why), 2 wrong usage, 130 interrupted.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from attention_client.enrich import EnrichError, Pool, Summary
from attention_client.enrich.plan import CONTEXT_VECTORS
from attention_client.enrich.servers import RETRY_SECONDS

from clients.enrich.engines import RAY, enrich

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a job and returns the exit code."""
    options = vars(_parser().parse_args(arguments))
    as_json = options.pop("json")
    try:
        summary = enrich(**options)
    except (EnrichError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: --resume goes on\n")
        return INTERRUPTED
    sys.stdout.write(_json(summary) if as_json else _text(summary))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m clients.enrich", description="Adds context vectors to a table as a new column."
    )
    parser.add_argument("source", metavar="INPUT", help="Parquet or Arrow IPC file, folder of them, or URL")
    parser.add_argument("output", metavar="OUTPUT", help="a file for a file, a folder for either")
    parser.add_argument("--model", required=True, metavar="NAME")
    parser.add_argument("--version", default="", metavar="V", help="default: the highest that answers")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--server", dest="servers", action="append", default=[], metavar="HOST:PORT", help="may be repeated"
    )
    where.add_argument(
        "--model-repository", metavar="FOLDER", help="compute in this process, without a server"
    )
    parser.add_argument("--engine", choices=[RAY], help="compute on a Ray cluster")
    parser.add_argument("--workers", type=int, metavar="N", help="most actors of a Ray cluster")
    parser.add_argument(
        "--cores-per-worker", type=int, default=1, metavar="N", help="of each actor; default: %(default)s"
    )
    parser.add_argument("--provider", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    columns = parser.add_argument_group("columns")
    columns.add_argument(
        "--column", required=True, metavar="C", help="of the query: vectors, token ids or texts"
    )
    columns.add_argument("--key-column", metavar="C", help="for cross-attention")
    columns.add_argument(
        "--value-column", metavar="C", help="for models that separate the value from the key"
    )
    columns.add_argument("--output-column", default=CONTEXT_VECTORS, metavar="C", help="default: %(default)s")
    columns.add_argument("--pool", choices=[*Pool], default=Pool.NONE, help="default: %(default)s")
    columns.add_argument("--weights", action="store_true", help="add the attention weights too")
    job = parser.add_argument_group("job")
    job.add_argument("--resume", action="store_true", help="go on with an unfinished job")
    job.add_argument("--overwrite", action="store_true", help="replace an output that is there, at the end")
    job.add_argument(
        "--on-error", choices=["fail", "skip"], default="fail", help="of a refused row; default: %(default)s"
    )
    job.add_argument(
        "--retry-seconds", type=float, default=RETRY_SECONDS, metavar="S", help="default: %(default)s"
    )
    job.add_argument("--quiet", action="store_true", help="show no progress")
    job.add_argument("--json", action="store_true", help="print the summary as JSON")
    return parser


def _json(summary: Summary) -> str:
    """What fits a line: the refused rows stand in their file."""
    values = dataclasses.asdict(summary)
    del values["refusals"], values["table"]
    return json.dumps(values) + "\n"


def _text(summary: Summary) -> str:
    parity = "unknown" if summary.parity_error is None else f"{summary.parity_error:.2g}"
    lines = [
        f"{summary.output}: {summary.rows:,} rows",
        f"{summary.tokens:,} tokens, {summary.tokens_per_second:,.0f} a second, {summary.seconds:,.1f} s",
        f"model {summary.model}, version {summary.version}; within {parity} of eager PyTorch where it ran",
    ]
    if summary.nulls:
        lines.append(f"{summary.nulls:,} rows had nothing to compute: null")
    if summary.rejects:
        lines.append(f"{summary.refused:,} rows were refused: {summary.rejects}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
