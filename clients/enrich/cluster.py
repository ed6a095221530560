"""Computes chunks on a Ray cluster: Ray Data passes each chunk to an actor that has loaded the model.

An actor computes a chunk as a single process does and writes the same record. A chunk that is lost with its
node is computed again by another actor, and `resume` works as without a cluster.
"""

import dataclasses
import logging
import os
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import ray
import ray.data
from attention_client.enrich import EnrichError, Summary
from attention_client.enrich.job import run_job
from attention_client.enrich.journal import Journal
from attention_client.enrich.options import JobOptions
from attention_client.enrich.plan import Chunk, JobPlan
from attention_client.enrich.progress import ProgressReporter
from attention_client.enrich.worker import run_chunks

from attention_serving.enrich.local import LocalBackend


@dataclass(frozen=True, kw_only=True)
class ActorOptions:
    """What an actor needs to load the model.

    Attributes:
        repository: Folder of artifacts, which every node can read.
        provider: cpu or cuda.
        cores: Cores of one actor.
        job: Options of the job; its version is the one that the driver chose.
    """

    repository: Path
    provider: str
    cores: int
    job: JobOptions

    def load(self) -> LocalBackend:
        """Loads the model in this process."""
        return LocalBackend(
            self.repository,
            self.job.model,
            self.job.version,
            return_weights=self.job.weights,
            embed=self.job.embed,
            provider=self.provider,
            parallel=self.cores,
        )


class ChunkActor:
    """Computes one chunk after the other."""

    def __init__(self, plan: JobPlan, journal: Journal, options: ActorOptions) -> None:
        self._plan = plan
        self._journal = journal
        self._options = options
        self._backend = options.load()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Computes the chunks of a batch; returns the tokens of each, or why it could not be computed."""
        results = [(chunk.index, *self._compute(chunk)) for chunk in batch["chunk"]]
        index, tokens, error = zip(*results, strict=True)
        return {"index": list(index), "tokens": list(tokens), "error": list(error)}

    def _compute(self, chunk: Chunk) -> tuple[int, str]:
        with ProgressReporter(0, show=False) as progress:
            try:
                for _ in run_chunks(
                    self._plan, [chunk], self._backend, self._options.job, self._journal, progress
                ):
                    pass
            except EnrichError as error:  # returned as a value: Ray would wrap the exception in its own text
                return 0, str(error)
        return progress.tokens, ""


def run_on_cluster(
    source: Any,
    output: str | PathLike[str] | None,
    *,
    repository: Path,
    provider: str,
    workers: int | None,
    cores: int,
    options: JobOptions,
) -> Summary:
    """Runs a job on the Ray cluster of RAY_ADDRESS or of this machine, or else on a new one.

    Args:
        source: See `run_job`; stored tables only.
        output: See `run_job`.
        repository: Folder of artifacts, which every node can read.
        provider: cpu or cuda.
        workers: Maximum number of actors, 1 or more; None for as many as the cluster has cores for.
        cores: Cores of each actor, 1 or more.
        options: Options of the job.

    Raises:
        EnrichError: There is no result. Recorded chunks are kept for `resume`.
    """
    actor = ActorOptions(repository=repository, provider=provider, cores=cores, job=options)
    backend = actor.load()  # fails at once if the model cannot be loaded, and states what it takes
    backend.close()
    resolved = dataclasses.replace(options, version=backend.model.version)
    runner = _RayRunner(dataclasses.replace(actor, job=resolved), workers)
    return run_job(source, output, backend, options, runner=runner.run_chunks)


@dataclass(frozen=True)
class _RayRunner:
    actor: ActorOptions
    workers: int | None

    def run_chunks(
        self, plan: JobPlan, chunks: Iterable[Chunk], journal: Journal, progress: ProgressReporter
    ) -> Generator[Chunk, None, None]:
        """Computes chunks in any order, and yields each that is recorded.

        Raises:
            EnrichError: A chunk cannot be computed.
        """
        remaining = {chunk.index: chunk for chunk in chunks}
        if not remaining:
            return
        _connect()
        try:
            for row in self._dataset(plan, list(remaining.values()), journal).iter_rows():
                if row["error"]:
                    raise EnrichError(row["error"])
                chunk = remaining[row["index"]]
                progress.add(chunk.stop - chunk.start, row["tokens"])
                yield chunk
        except ray.exceptions.RayError as error:
            raise EnrichError(str(error)) from error

    def _dataset(self, plan: JobPlan, chunks: list[Chunk], journal: Journal) -> ray.data.Dataset:
        return ray.data.from_items(
            [{"chunk": chunk} for chunk in chunks], override_num_blocks=len(chunks)
        ).map_batches(
            ChunkActor,
            fn_constructor_args=(plan, journal, self.actor),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=self.workers or len(chunks)),
            num_cpus=self.actor.cores,
        )


def _connect() -> None:
    # Ray reports usage statistics to its vendor unless this is set.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
