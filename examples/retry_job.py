"""A task for a scheduler such as Airflow: enriches a table on servers, and is safe to run again at any time.

    make serve                                               # in another terminal
    python -m examples.retry_job embeddings.parquet enriched.parquet --server 127.0.0.1:8001

- A short outage: requests that a lost server has not answered are sent again, for `--retry-seconds`.
- A longer one, or the task is killed: the scheduler runs the same command again, which continues.
- The output is complete: the same command computes nothing and succeeds.

Exit status: 0 if the output is complete; 1 if repeating the task does not help; 2 for wrong usage; 75
(EX_TEMPFAIL) if no server answered, so that the scheduler should run the task again later.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from attention_client.enrich import EnrichError, ServersUnavailableError, enrich


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Enrich a table on servers; safe to run again at any time.")
    parser.add_argument("source", help="Parquet or Arrow file, or a folder of them")
    parser.add_argument("output", help="the enriched copy")
    parser.add_argument("--server", action="append", help="HOST:PORT, repeated (default: 127.0.0.1:8001)")
    parser.add_argument("--model", default="multi-head-768x12", help="(default: %(default)s)")
    parser.add_argument("--column", default="embeddings", help="column of sequences (default: %(default)s)")
    parser.add_argument("--retry-seconds", type=float, default=60, help="without an answer (default: 60)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the task, and returns the exit status."""
    options = parse(arguments)
    try:
        summary = enrich(
            options.source,
            options.output,
            servers=options.server or ["127.0.0.1:8001"],
            model=options.model,
            column=options.column,
            pool="mean",
            retry_seconds=options.retry_seconds,
            resume=True,
        )
    except EnrichError as error:
        print(f"error: {error}", file=sys.stderr)
        return os.EX_TEMPFAIL if isinstance(error, ServersUnavailableError) else 1
    computed = summary.rows - summary.resumed_rows
    print(f"{summary.output}: {summary.rows} rows, {computed} of them computed now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
