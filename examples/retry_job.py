"""A task for a scheduler such as Airflow: enriches a table on servers, and is safe to run again at any time.

    make serve                                               # in another terminal
    python -m examples.make_table embeddings.parquet
    python -m examples.retry_job embeddings.parquet enriched.parquet --server 127.0.0.1:8001

- A short outage: requests that a lost server has not answered are sent again, for `--retry-seconds`.
- A longer one: the task is attempted again after a delay that doubles, and keeps its finished chunks.
- The task is killed, or all attempts fail: the scheduler runs the same command again, which continues.
- The output is complete: the same command computes nothing and succeeds.

Exit status: 0 if the output is complete; 1 if repeating the task does not help; 2 for wrong usage; 75
(EX_TEMPFAIL) if no server answered, so that the scheduler should run the task again later.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from attention_client.enrich import EnrichError, ServersUnavailableError, Summary, enrich

log = logging.getLogger("retry_job")


def attempt(task: Callable[[], Summary], *, attempts: int, delay: float) -> Summary:
    """Runs a task until it succeeds, fails for good, or has failed `attempts` times.

    Args:
        task: Continues where its last run ended.
        attempts: Number of runs, 1 or more.
        delay: Seconds before the second run; doubled before each further run.
    """
    for left in range(attempts - 1, -1, -1):
        try:
            return task()
        except ServersUnavailableError as error:
            log.warning("%s (%d attempts left)", error, left)
            if not left:
                raise
            time.sleep(delay)
            delay *= 2
    raise ValueError(f"attempts={attempts}; must be 1 or more")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Enrich a table on servers; safe to run again at any time.")
    parser.add_argument("source", help="Parquet or Arrow file, or a folder of them")
    parser.add_argument("output", help="the enriched copy")
    parser.add_argument("--server", action="append", help="HOST:PORT, repeated (default: 127.0.0.1:8001)")
    parser.add_argument("--model", default="multi-head-768x12", help="(default: %(default)s)")
    parser.add_argument("--column", default="embeddings", help="column of sequences (default: %(default)s)")
    parser.add_argument("--attempts", type=int, default=5, help="runs of the task (default: %(default)s)")
    parser.add_argument("--delay", type=float, default=5, help="seconds before the second (default: 5)")
    parser.add_argument("--retry-seconds", type=float, default=60, help="without an answer (default: 60)")
    given = parser.parse_args(arguments)
    if given.attempts < 1 or given.delay < 0:
        parser.error("--attempts must be 1 or more, and --delay 0 or more")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the task, and returns the exit status."""
    given = parse(arguments)
    task = partial(
        enrich,
        given.source,
        given.output,
        servers=given.server or ["127.0.0.1:8001"],
        model=given.model,
        column=given.column,
        pool="mean",
        retry_seconds=given.retry_seconds,
        resume=True,
    )
    try:
        summary = attempt(task, attempts=given.attempts, delay=given.delay)
    except EnrichError as error:
        log.error("%s", error)
        return os.EX_TEMPFAIL if isinstance(error, ServersUnavailableError) else 1
    computed = summary.rows - summary.resumed_rows
    print(f"{summary.output}: {summary.rows} rows, {computed} of them computed now")
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sys.exit(main())
