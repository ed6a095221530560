"""Adds context vectors to a table on a Ray cluster, without a server.

    make demo                                       # exports the default model
    python -m examples.make_table embeddings.parquet
    python -m examples.ray_job embeddings.parquet enriched.parquet

Each actor loads the model, checks it against its golden vectors, and computes chunks of the table. The job
uses the cluster of RAY_ADDRESS or of this machine, or else starts one on this machine. If a node is lost,
another computes its chunks; if the whole job is lost, the same command continues it.

Exit status: 0 if the output is complete, 1 if there is no result.
"""

import argparse
import sys
from collections.abc import Sequence

from attention_client.enrich import EnrichError

from attention_serving.enrich import enrich


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Add context vectors to a table on a Ray cluster.")
    parser.add_argument("source", help="Parquet or Arrow file, or a folder of them")
    parser.add_argument("output", help="the enriched copy; the same path continues an interrupted job")
    parser.add_argument("--column", default="embeddings", help="column of sequences (default: %(default)s)")
    parser.add_argument(
        "--model-repository",
        default="model_repository",
        help="folder that every node can read (default: %(default)s)",
    )
    parser.add_argument("--model", default="multi-head-768x12", help="(default: %(default)s)")
    parser.add_argument("--pool", default="mean", help="none, mean, cls or max (default: %(default)s)")
    parser.add_argument("--actors", type=int, help="maximum number of actors (default: one for each core)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the job, and returns the exit status."""
    given = parse(arguments)
    try:
        summary = enrich(
            given.source,
            given.output,
            model=given.model,
            column=given.column,
            pool=given.pool,
            model_repository=given.model_repository,
            engine="ray",
            workers=given.actors,
            resume=True,
        )
    except EnrichError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    computed = summary.rows - summary.resumed_rows
    print(f"{summary.output}: {summary.rows} rows, {computed} of them computed now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
