"""Does chunks on a Ray cluster: Ray Data hands each to an actor that has the model.

What an actor does with a chunk is what a single process does with it, and its record lies with the parts:
a chunk that was lost with its node is done again by another, and `resume` works as anywhere.
"""

import logging
import os
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.data
from attention_client.enrich.errors import EnrichError
from attention_client.enrich.journal import Journal
from attention_client.enrich.plan import Chunk, Options, Plan
from attention_client.enrich.progress import Progress
from attention_client.enrich.worker import run_chunks

from clients.enrich.local import LocalBackend


@dataclass(frozen=True, kw_only=True)
class ActorOptions:
    """What an actor needs to make its engine.

    Attributes:
        repository: Folder of artifacts, as every node sees it.
        cores: Cores of one actor.
    """

    repository: Path
    model: str
    version: str
    provider: str
    cores: int
    options: Options


class ChunkActor:
    """Does chunks one after the other."""

    def __init__(self, plan: Plan, journal: Journal, actor: ActorOptions) -> None:
        self._plan = plan
        self._journal = journal
        self._options = actor.options
        self._backend = LocalBackend(
            actor.repository,
            actor.model,
            actor.version,
            return_weights=actor.options.weights_column is not None,
            provider=actor.provider,
            parallel=actor.cores,
        )

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Does the chunks of a batch; tells of each its tokens, or why it is not done."""
        told: dict[str, list[Any]] = {"index": [], "tokens": [], "error": []}
        for chunk in batch["chunk"]:
            tokens, error = self._do(chunk)
            told["index"].append(chunk.index)
            told["tokens"].append(tokens)
            told["error"].append(error)
        return told

    def _do(self, chunk: Chunk) -> tuple[int, str]:
        with Progress(0, quiet=True) as progress:
            try:
                for _ in run_chunks(
                    self._plan, [chunk], self._backend, self._options, self._journal, progress
                ):
                    pass
            except EnrichError as error:  # as a value: Ray would hide what it says behind its own
                return 0, str(error)
        return progress.tokens, ""


@dataclass(frozen=True)
class Cluster:
    """The cluster that Ray finds: that of RAY_ADDRESS or of this machine, or a new one.

    Attributes:
        workers: Most actors; None for as many as there is room for.
    """

    actor: ActorOptions
    workers: int | None

    def run_chunks(
        self, plan: Plan, chunks: Iterable[Chunk], journal: Journal, progress: Progress
    ) -> Generator[Chunk, None, None]:
        """Does chunks wherever there is room, and yields each that is recorded.

        Raises:
            EnrichError: A chunk cannot be done.
        """
        left = {chunk.index: chunk for chunk in chunks}
        if not left:
            return
        # Ray tells its vendor of its clusters and data unless it is told not to.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.WARNING)
        ray.data.DataContext.get_current().enable_progress_bars = False
        done = ray.data.from_items(
            [{"chunk": chunk} for chunk in left.values()], override_num_blocks=len(left)
        ).map_batches(
            ChunkActor,
            fn_constructor_args=(plan, journal, self.actor),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=self.workers or len(left)),
            num_cpus=self.actor.cores,
        )
        try:
            for row in done.iter_rows():
                if row["error"]:
                    raise EnrichError(row["error"])
                chunk = left[row["index"]]
                progress.add(chunk.stop - chunk.start, row["tokens"])
                yield chunk
        except ray.exceptions.RayError as error:
            raise EnrichError(str(error)) from error
