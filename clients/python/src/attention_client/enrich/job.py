"""A job from start to end: plan, compute the chunks, assemble the output, rename it into place."""

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby, takewhile
from math import ceil
from operator import itemgetter
from os import PathLike, fspath
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from attention_client.enrich.backends import Backend
from attention_client.enrich.batches import BATCH_REQUESTS, Batch, make_splitter
from attention_client.enrich.journal import (
    ChunkWriter,
    Journal,
    OutputAssembler,
    is_complete,
    write_rejects,
)
from attention_client.enrich.options import EnrichOptions, OnError
from attention_client.enrich.outcome import EnrichError, Figures, Summary, were_refused
from attention_client.enrich.plan import Chunk, JobPlan, make_plan
from attention_client.enrich.tables import (
    Location,
    RowBatch,
    check_replaceable,
    locate,
    locate_target,
    open_source,
)
from attention_client.enrich.texts import PassageSplitter

# How often progress is reported.
LINE_SECONDS, TERMINAL_SECONDS = 10.0, 0.2
Item = TypeVar("Item")


class ProgressReporter:
    """Counts rows and tokens, and reports them on stderr if asked.

    Attributes:
        tokens: Query and key rows computed so far.
    """

    def __init__(self, rows: int, *, show: bool) -> None:
        self.tokens = 0
        self._rows, self._total, self._show = 0, rows, show
        self._started = self._reported = time.monotonic()
        # On a terminal, a line replaces the one before.
        self._end, self._pause = ("\r", TERMINAL_SECONDS) if sys.stderr.isatty() else ("\n", LINE_SECONDS)

    def add(self, rows: int, tokens: int) -> None:
        """Counts computed rows."""
        self._rows += rows
        self.tokens += tokens
        now = time.monotonic()
        is_last = self._rows == self._total
        if self._show and (now - self._reported >= self._pause or is_last):
            self._reported, seconds = now, max(now - self._started, 1e-9)
            remaining = seconds / max(self._rows, 1) * (self._total - self._rows)
            rate = f"{self.tokens / seconds:,.0f} tokens/s, {remaining:,.0f} s left"
            line = f"{self._rows:,} of {self._total:,} rows, {rate}"
            sys.stderr.write(f"{line:<78}" + ("\n" if is_last else self._end))
            sys.stderr.flush()


# Computes chunks, here or elsewhere, and yields each that is recorded.
ChunkRunner: TypeAlias = Callable[
    [JobPlan, Iterable[Chunk], Journal, ProgressReporter], Generator[Chunk, None, None]
]


class NothingComputedError(EnrichError):
    """Every row that had something to compute was refused."""


@contextmanager
def _errors_of_tables() -> Iterator[None]:
    """Turns what Arrow raises into errors of the job, which have one line."""
    try:
        yield
    except (pa.ArrowException, UnicodeError, KeyError) as error:
        raise EnrichError(f"the table cannot be read or written ({type(error).__name__}): {error}") from error


@_errors_of_tables()
def run_job(
    source: Any,
    output: str | PathLike[str] | None,
    backend: Backend,
    options: EnrichOptions,
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
    if opened.table and (options.resume or runner):
        raise EnrichError(
            "a table in memory can neither be resumed nor computed on a cluster: store it in a file"
        )
    plan = make_plan(opened, backend.model, options)
    splitter = make_splitter(plan, backend)  # refuses what cannot be cut before anything is computed
    runner = runner or partial(run_chunks, backend=backend, splitter=splitter)
    if output is not None:
        return _run(plan, locate_target(fspath(output), opened), runner)
    if not opened.table:
        raise EnrichError("name an output: only tables in memory and datasets can be enriched without one")
    with TemporaryDirectory() as folder:
        target = locate(folder) / "table.arrows"  # a stream keeps the dictionaries of each batch
        summary = _run(plan, target, runner)
        # Stays readable after the folder is removed.
        table = pa.ipc.open_stream(pa.memory_map(target.path)).read_all()
    return replace(summary, output=None, rejects=None, table=table)


def _run(plan: JobPlan, target: Location, runner: ChunkRunner) -> Summary:
    """Runs a job. The output exists when this returns, not before."""
    journal, resume = Journal(target, plan), plan.options.resume
    skip = plan.options.on_error is OnError.SKIP
    rows = sum(file.rows for file in plan.source.files)
    if target.exists:
        if resume and is_complete(plan, target):
            journal.discard()
            return _summary(plan, target, Figures(rows), None, resumed_rows=rows, already_complete=True)
        check_replaceable(target, overwrite=plan.options.overwrite, resume=resume)
    started = time.monotonic()
    try:
        with journal.open(resume=resume), closing(OutputAssembler(plan, journal, target)) as output:
            earlier, tokens = _compute(plan, journal, output, runner)
            records = [journal.read(chunk) for chunk in plan.chunks]
            rejects = write_rejects(plan, records, target) if skip else None
            figures = Figures()
            for record in records:
                figures.add(record)
            _check_refusals(plan, figures, skip=skip)
            output.move_into_place()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(journal.kept()) from None
    except NothingComputedError:
        journal.remove()
        raise
    journal.remove()
    seconds = time.monotonic() - started
    return _summary(
        plan,
        target,
        figures,
        rejects,
        resumed_rows=earlier,
        resumed_tokens=figures.tokens - tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
    )


def _compute(
    plan: JobPlan, journal: Journal, output: OutputAssembler, runner: ChunkRunner
) -> tuple[int, int]:
    """Computes the chunks that earlier runs did not finish.

    Returns:
        How many rows those had finished, and the tokens that were computed now.
    """
    refused, limit = 0, plan.options.max_errors

    def accept(chunk: Chunk) -> None:
        nonlocal refused
        output.add(chunk)
        refusals = journal.read(chunk).refusals
        refused += len(refusals)
        if limit is not None and refused > limit:
            raise EnrichError(
                f"{were_refused(refused)}, more than max_errors={limit}; the last is row {refusals[-1].row}: "
                f"{refusals[-1].message}. Finished chunks are kept: --resume with a larger --max-errors "
                "continues"
            )

    chunks, remaining = list(plan.chunks), []
    for chunk in chunks:
        if (pending := journal.pending(chunk)) is None:
            accept(chunk)
        else:
            remaining.append(pending)
    rows = sum(chunk.stop - chunk.start for chunk in remaining)
    progress = ProgressReporter(rows, show=plan.options.progress)
    with closing(runner(plan, remaining, journal, progress)) as finished:
        for chunk in finished:
            accept(chunks[chunk.index])
    return sum(file.rows for file in plan.source.files) - rows, progress.tokens


def _check_refusals(plan: JobPlan, figures: Figures, *, skip: bool) -> None:
    refused = len(figures.refusals)
    if refused and not skip:
        raise EnrichError(
            f"{were_refused(refused)} and skipped by an earlier run; pass --on-error skip (on_error='skip') "
            "to accept them"
        )
    if refused and not figures.tokens:
        first = figures.refusals[0]
        raise NothingComputedError(
            f"nothing was computed: {were_refused(refused)}; the first is row {first.row}: {first.message}"
            f"{plan.advice(first)}"
        )


def _summary(plan: JobPlan, target: Location, figures: Figures, rejects: str | None, **run: Any) -> Summary:
    values = {**asdict(figures), "refusals": tuple(figures.refusals)}
    return Summary(
        output=str(target),
        refused=len(figures.refusals),
        rejects=rejects,
        model=plan.model.name,
        version=plan.model.version,
        parity_error=parity.measured_max_abs_error if (parity := plan.model.parity) else None,
        **values,
        **run,
    )


def run_chunks(
    plan: JobPlan,
    chunks: Iterable[Chunk],
    journal: Journal,
    progress: ProgressReporter,
    backend: Backend,
    splitter: PassageSplitter | None,
) -> Generator[Chunk, None, None]:
    """Computes chunks in this process in their order, and yields each when it is recorded.

    Raises:
        EnrichError: The job cannot continue. Recorded chunks are kept.
    """
    plan.model.check(backend.model.digest)  # a process of a cluster has loaded the model by itself
    for chunk, batches in groupby(_submitted(plan, chunks, journal, backend, splitter), key=itemgetter(0)):
        with ChunkWriter(journal, chunk, plan.output_schema) as writer:
            for _, batch in batches:
                figures = writer.add(batch)
                progress.add(figures.rows, figures.tokens)
        yield chunk


def _submitted(
    plan: JobPlan,
    chunks: Iterable[Chunk],
    journal: Journal,
    backend: Backend,
    splitter: PassageSplitter | None,
) -> Iterator[tuple[Chunk, Batch]]:
    """Submitted batches, in order. Their number is bounded, so a slow writer slows the reader down."""
    # Enough for the backend's concurrent requests, one batch to submit and one to write.
    limit = 2 + ceil(backend.concurrency / BATCH_REQUESTS)
    pending: deque[tuple[Chunk, Batch]] = deque()
    # Cells are read and texts are encoded on a thread, while requests are computed and results are written.
    batches = ((chunk, Batch(rows, plan, backend, splitter)) for chunk, rows in _batches(plan, chunks))
    with closing(read_ahead(batches)) as ready:
        for chunk, batch in ready:
            if len(pending) >= limit:
                yield pending.popleft()
            batch.submit(journal.saved(chunk) if batch.first == chunk.start else ())
            pending.append((chunk, batch))
    while pending:
        yield pending.popleft()


def read_ahead(items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    """Yields the items of a generator, of which none is None and which runs on a thread, one item ahead.

    Its exceptions are raised here. Closing this generator waits for the item in progress.
    """
    try:
        with ThreadPoolExecutor(1, "read-ahead") as thread:
            item = thread.submit(next, items, None)
            while (ready := item.result()) is not None:
                item = thread.submit(next, items, None)
                yield ready
    finally:
        items.close()


def _batches(plan: JobPlan, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, RowBatch]]:
    """The batches of chunks, none of which spans two chunks. Each file is read once."""
    for name, of_file in groupby(chunks, key=lambda chunk: chunk.name):
        remaining = deque(of_file)
        first, last = remaining[0], remaining[-1]
        if first.start == first.stop:  # a file without rows has one chunk, with an empty batch
            yield first, (0, plan.source.no_rows())
        with closing(plan.source.open(name)) as table:
            for start, rows in table.batches(first.start, last.stop):
                stop = start + rows.num_rows
                while remaining[0].stop <= start:
                    remaining.popleft()
                for chunk in takewhile(lambda chunk: chunk.start < stop, remaining):  # noqa: B023 - used here
                    begin, end = max(start, chunk.start), min(stop, chunk.stop)
                    step = plan.rows_at_once(rows)
                    for at in range(begin, end, step):
                        yield chunk, (at, rows.slice(at - start, min(step, end - at)))
