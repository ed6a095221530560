"""Computes chunks on a Ray cluster: Ray Data passes each chunk to an actor that has loaded the model.

An actor computes a chunk as a single process does and writes the same record. A chunk that is lost with its
node is computed again by another actor, and `resume` works as without a cluster.
"""

import logging
import os
from collections.abc import Callable, Generator, Iterable
from typing import Any

import ray
import ray.data
from attention_client.enrich import EnrichError
from attention_client.enrich.backends import Backend
from attention_client.enrich.batches import make_splitter
from attention_client.enrich.job import ChunkRunner, ProgressReporter, run_chunks
from attention_client.enrich.journal import Journal
from attention_client.enrich.plan import Chunk, JobPlan


class ChunkActor:
    """Computes one chunk after the other."""

    def __init__(self, plan: JobPlan, journal: Journal, load: Callable[[], Backend]) -> None:
        self._plan = plan
        self._journal = journal
        self._backend = load()
        self._splitter = make_splitter(plan, self._backend)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Computes the chunk of a batch; returns its tokens, or why it could not be computed."""
        (chunk,) = batch["chunk"]
        error, progress = "", ProgressReporter(0, show=False)
        # An actor that was lost with its node may have recorded a part of the chunk.
        pending = filter(None, [self._journal.pending(chunk)])
        try:
            list(run_chunks(self._plan, pending, self._journal, progress, self._backend, self._splitter))
        except EnrichError as caught:  # returned as a value: Ray would wrap the exception in its own text
            error = str(caught)
        return {"index": [chunk.index], "tokens": [progress.tokens], "error": [error]}


def make_runner(load: Callable[[], Backend], cores: int, workers: int | None) -> ChunkRunner:
    """Computes chunks on the Ray cluster of RAY_ADDRESS or of this machine, or else on a new one.

    Args:
        load: Loads the model in the process of an actor.
        cores: Cores of each actor, 1 or more.
        workers: Maximum number of actors, 1 or more; None for as many as the cluster has cores for.
    """

    def run(
        plan: JobPlan, chunks: Iterable[Chunk], journal: Journal, progress: ProgressReporter
    ) -> Generator[Chunk, None, None]:
        remaining = {chunk.index: chunk for chunk in chunks}
        if not remaining:
            return
        _connect()
        items = [{"chunk": chunk} for chunk in remaining.values()]
        computed = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            ChunkActor,
            fn_constructor_args=(plan, journal, load),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=workers or len(items)),
            num_cpus=cores,
        )
        try:
            for row in computed.iter_rows():
                if row["error"]:
                    raise EnrichError(row["error"])
                chunk = remaining[row["index"]]
                progress.add(chunk.stop - chunk.start, row["tokens"])
                yield chunk
        except ray.exceptions.RayError as error:
            raise EnrichError(str(error)) from error

    return run


def _connect() -> None:
    # Ray reports usage statistics to its vendor unless this is set.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
