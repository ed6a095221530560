"""A job from its beginning to its end: plan, do the chunks, put their parts together, rename into place."""

import posixpath
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from os import PathLike, fspath
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from pyarrow import fs

from attention_client.enrich.assembler import Result
from attention_client.enrich.backend import Backend
from attention_client.enrich.errors import EnrichError
from attention_client.enrich.journal import REJECTS, Journal, Record, reject_lines
from attention_client.enrich.plan import Chunk, Options, Plan, make_plan
from attention_client.enrich.progress import Progress
from attention_client.enrich.row_batch import Refusal
from attention_client.enrich.sources import Source, open_source
from attention_client.enrich.storage import Location, locate
from attention_client.enrich.tables import is_table
from attention_client.enrich.worker import run_chunks

# Does the chunks that are left, here or elsewhere, and yields each that is done.
RunChunks = Callable[[Plan, Iterable[Chunk], Journal, Progress], Generator[Chunk, None, None]]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a finished job did.

    Attributes:
        output: Where the result lies; None where it is `table`.
        rows: Rows of the table.
        refused: Rows without a result because they were refused.
        nulls: Rows without a result because there is nothing to compute.
        tokens: Query and key rows that were computed for all of them.
        resumed_rows: How many of the rows an earlier run, which was interrupted, had done.
        seconds: How long this run of the job took.
        tokens_per_second: Of what this run computed.
        model: Name of the model.
        version: Its version.
        parity_error: Largest difference from eager PyTorch that was measured where it ran; None if unknown.
        rejects: File with a line of JSON for each refused row; None where there is none.
        refusals: The refused rows, each with its number in its file.
        table: The result, where no output was named.
    """

    output: str | None
    rows: int
    refused: int
    nulls: int
    tokens: int
    resumed_rows: int
    seconds: float
    tokens_per_second: float
    model: str
    version: str
    parity_error: float | None
    rejects: str | None
    refusals: tuple[Refusal, ...]
    table: pa.Table | None = None


def run_job(
    source: Any,
    output: str | PathLike[str] | None,
    backend: Backend,
    options: Options,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    do: RunChunks | None = None,
) -> Summary:
    """Enriches a table.

    Args:
        source: What `open_source` opens.
        output: A file, by its ending such as .parquet, or a folder; local or by its URL. None for the
            `table` of the summary.
        backend: Computes.
        options: What is asked of every row.
        resume: Whether to go on with an unfinished job.
        overwrite: Whether to replace an output that is there, at the end.
        quiet: Whether to show no progress.
        do: Does the chunks in place of this process.

    Raises:
        EnrichError: There is no result; what was done stays for `resume`.
    """
    opened = open_source(source)
    if (resume or do) and not opened.is_lasting:
        raise EnrichError("a table that is no file is neither resumed nor spread over a cluster")
    job = _Job(opened, backend, options, do or _here(backend, options), resume=resume, quiet=quiet)
    if output is None:
        if opened.is_lasting:
            raise EnrichError("name an output: only a table in memory becomes one in memory")
        return job.run_in_memory()
    return job.run(_target(fspath(output), opened, overwrite=overwrite))


def _target(output: str, source: Source, *, overwrite: bool) -> Location:
    """Where the result goes: nowhere that anything else would be lost."""
    if not output:
        raise EnrichError("the output has no name")
    target = locate(output.rstrip("/") or output)
    for place in source.places:
        if target.overlaps(place):
            raise EnrichError(f"the output {target} does not lie apart from the input {place}")
    is_folder = [file.name for file in source.files] != [""]
    if is_folder and is_table(target.path):
        raise EnrichError(f"a folder becomes a folder: {target} names a file")
    has_ending = posixpath.splitext(target.path)[1] != "" and not output.endswith("/")
    if has_ending and not is_folder and not is_table(target.path):
        raise EnrichError(f"{target} is neither .parquet nor .arrow; the name of a folder ends in /")
    if target.exists and not overwrite:
        raise EnrichError(f"{target} exists; --overwrite replaces it")
    if target.kind is fs.FileType.Directory:
        for name, _ in target.files(hidden=True):
            if not is_table(name):
                raise EnrichError(f"{target} holds {name}, which is no table: it is not replaced")
    return target


def _here(backend: Backend, options: Options) -> RunChunks:
    return lambda plan, chunks, journal, progress: run_chunks(
        plan, chunks, backend, options, journal, progress
    )


class _Job:
    def __init__(
        self,
        source: Source,
        backend: Backend,
        options: Options,
        do: RunChunks,
        *,
        resume: bool,
        quiet: bool,
    ) -> None:
        self._plan = make_plan(source, backend.model, options)
        self._model = backend.model
        self._skip_refused = options.skip_refused
        self._do = do
        self._resume = resume
        self._quiet = quiet

    def run_in_memory(self) -> Summary:
        """Runs it in a temporary folder; the table read from there keeps its pages when the folder goes."""
        with TemporaryDirectory() as folder:
            target = locate(folder) / "table.arrow"
            summary = self.run(target)
            table = pa.ipc.open_file(pa.memory_map(target.path)).read_all()
        return replace(summary, output=None, rejects=None, table=table)

    def run(self, target: Location) -> Summary:
        """Runs it; the result is there when this returns, and not before."""
        started = time.monotonic()
        journal = Journal(target, self._plan)
        with journal.open(resume=self._resume), Result(self._plan, journal, target) as result:
            progress = self._do_what_is_left(journal, result)
            records = [journal.read(chunk) for chunk in self._plan.chunks]
            refusals = tuple(refusal for record in records for refusal in record.refusals)
            if refusals and not self._skip_refused:  # by an earlier run, which skipped them
                raise EnrichError(f"refused rows: {len(refusals)}; --on-error skip goes on")
            rejects = self._write_rejects(target, records)
            result.move()
        journal.remove()
        seconds = time.monotonic() - started
        rows = sum(record.rows for record in records)
        return Summary(
            output=str(target),
            rows=rows,
            refused=len(refusals),
            nulls=sum(record.nulls for record in records),
            tokens=sum(record.tokens for record in records),
            resumed_rows=rows - progress.total,
            seconds=seconds,
            tokens_per_second=progress.tokens / seconds,
            model=self._model.name,
            version=self._model.version,
            parity_error=self._model.parity_error,
            rejects=rejects,
            refusals=refusals,
        )

    def _do_what_is_left(self, journal: Journal, result: Result) -> Progress:
        left: list[Chunk] = []
        for chunk in self._plan.chunks:
            if journal.is_done(chunk):
                result.add(chunk)
            else:
                left.append(chunk)
        rows = sum(chunk.stop - chunk.start for chunk in left)
        with (
            Progress(rows, quiet=self._quiet) as progress,
            closing(self._do(self._plan, left, journal, progress)) as done,
        ):
            for chunk in done:
                result.add(chunk)
        return progress

    def _write_rejects(self, target: Location, records: list[Record]) -> str | None:
        rejects = target.beside(REJECTS)
        rejects.remove()
        if not any(record.refusals for record in records):
            return None
        with rejects.replaced() as file:
            for line in reject_lines(self._plan, records):
                file.write(line)
        return str(rejects)
