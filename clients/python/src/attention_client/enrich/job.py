"""A job from start to end: plan, compute the chunks, assemble the output, rename it into place."""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import replace
from os import PathLike, fspath
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import pyarrow as pa

from attention_client.enrich.assembler import OutputAssembler, is_complete
from attention_client.enrich.backend import Backend
from attention_client.enrich.errors import EnrichError
from attention_client.enrich.journal import Journal
from attention_client.enrich.options import JobOptions
from attention_client.enrich.plan import Chunk, JobPlan, make_plan
from attention_client.enrich.progress import ProgressReporter
from attention_client.enrich.refusals import (
    REJECTS,
    ErrorBudget,
    NothingComputedError,
    all_refusals,
    check_refusals,
    read_rejects,
    write_rejects,
)
from attention_client.enrich.sources import open_source
from attention_client.enrich.storage import Location, locate
from attention_client.enrich.summary import Summary
from attention_client.enrich.targets import check_replaceable, locate_target
from attention_client.enrich.texts import make_splitter
from attention_client.enrich.worker import run_chunks

# Computes chunks, here or elsewhere, and yields each that is recorded.
ChunkRunner: TypeAlias = Callable[
    [JobPlan, Iterable[Chunk], Journal, ProgressReporter], Generator[Chunk, None, None]
]


def run_job(
    source: Any,
    output: str | PathLike[str] | None,
    backend: Backend,
    options: JobOptions,
    *,
    runner: ChunkRunner | None = None,
) -> Summary:
    """Adds context vectors or embeddings to a table.

    Args:
        source: See `open_source`.
        output: Path or URL of a file, if its name ends in the suffix of a table format, or of a folder. None
            returns the result as the `table` of the summary.
        backend: Computes the context vectors.
        options: Options of the job.
        runner: Computes the chunks elsewhere; None computes them in this process.

    Raises:
        EnrichError: There is no result. Recorded chunks are kept for `resume`.
    """
    opened = open_source(source)
    if (options.resume or runner) and not opened.is_stored:
        raise EnrichError(
            "a table in memory can neither be resumed nor computed on a cluster: store it in a file"
        )
    plan = make_plan(opened, backend.model, options)
    make_splitter(backend, options)  # passages that cannot be cut are refused before anything is computed
    job = _Job(plan, backend, options, runner)
    if output is not None:
        return job.run(locate_target(fspath(output), opened))
    if opened.is_stored:
        raise EnrichError("name an output: only tables in memory and datasets can be enriched without one")
    return job.run_in_memory()


class _Job:
    def __init__(
        self, plan: JobPlan, backend: Backend, options: JobOptions, runner: ChunkRunner | None
    ) -> None:
        self._plan = plan
        self._backend = backend
        self._options = options
        self._runner = runner or self._run_here
        self._resumed_rows = 0

    def run_in_memory(self) -> Summary:
        """Runs in a temporary folder; the mapped table stays readable after the folder is removed."""
        with TemporaryDirectory() as folder:
            target = locate(folder) / "table.arrow"
            summary = self.run(target)
            table = pa.ipc.open_file(pa.memory_map(target.path)).read_all()
        return replace(summary, output=None, rejects=None, table=table)

    def run(self, target: Location) -> Summary:
        """Runs the job. The output exists when this returns, not before."""
        options, journal = self._options, Journal(target, self._plan)
        if target.exists:
            if options.resume and is_complete(self._plan, target):
                journal.discard()
                return self._complete_summary(target)
            check_replaceable(target, overwrite=options.overwrite, resume=options.resume)
        started = time.monotonic()
        try:
            with journal.open(resume=options.resume), OutputAssembler(self._plan, journal, target) as output:
                started -= journal.read_seconds()
                self._run_remaining(journal, output, started)
                summary = self._finish(journal, target)
                output.move_into_place()
        except NothingComputedError:
            journal.remove()
            raise
        journal.remove()
        seconds = time.monotonic() - started
        return replace(summary, seconds=seconds, tokens_per_second=summary.tokens / seconds)

    def _run_here(
        self, plan: JobPlan, chunks: Iterable[Chunk], journal: Journal, progress: ProgressReporter
    ) -> Generator[Chunk, None, None]:
        return run_chunks(plan, chunks, self._backend, self._options, journal, progress)

    def _run_remaining(self, journal: Journal, output: OutputAssembler, started: float) -> None:
        """Computes the chunks that earlier runs did not finish."""
        remaining: list[Chunk] = []
        budget = ErrorBudget(self._options.max_errors)
        for chunk in self._plan.chunks:
            if journal.has(chunk):
                self._resumed_rows += chunk.stop - chunk.start
                budget.spend(journal.read(chunk))
                output.add(chunk)
            else:
                remaining.append(chunk)
        rows = sum(chunk.stop - chunk.start for chunk in remaining)
        with (
            ProgressReporter(rows, show=self._options.progress) as progress,
            closing(self._runner(self._plan, remaining, journal, progress)) as finished,
        ):
            try:
                for chunk in finished:
                    output.add(chunk)
                    journal.write_seconds(time.monotonic() - started)
                    budget.spend(journal.read(chunk))
            finally:  # an interruption may come between the record of a chunk and the line above
                journal.write_seconds(time.monotonic() - started)

    def _finish(self, journal: Journal, target: Location) -> Summary:
        """Lists the refused rows and adds up the records of all chunks."""
        records = [journal.read(chunk) for chunk in self._plan.chunks]
        rejects = write_rejects(self._plan, records, target) if self._options.skip_refused else None
        check_refusals(records, skip=self._options.skip_refused)
        refusals = all_refusals(records)
        return replace(
            self._empty_summary(target),
            refused=len(refusals),
            nulls=sum(record.nulls for record in records),
            passages=sum(record.passages for record in records),
            truncated=sum(record.truncated for record in records),
            tokens=sum(record.tokens for record in records),
            rejects=rejects,
            refusals=refusals,
        )

    def _complete_summary(self, target: Location) -> Summary:
        """The summary of a job that was finished before."""
        refusals = read_rejects(target)
        summary = self._empty_summary(target)
        return replace(
            summary,
            refused=len(refusals),
            resumed_rows=summary.rows,
            rejects=str(target.with_suffix(REJECTS)) if refusals else None,
            refusals=refusals,
            already_complete=True,
        )

    def _empty_summary(self, target: Location) -> Summary:
        return Summary(
            output=str(target),
            rows=sum(file.rows for file in self._plan.source.files),
            refused=0,
            nulls=0,
            passages=0,
            truncated=0,
            tokens=0,
            resumed_rows=self._resumed_rows,
            seconds=0.0,
            tokens_per_second=0.0,
            model=self._backend.model.name,
            version=self._backend.model.version,
            parity_error=self._backend.model.parity_error,
            rejects=None,
            refusals=(),
        )
