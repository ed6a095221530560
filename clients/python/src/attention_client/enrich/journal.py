"""What a job leaves on disk: finished rows and their records, refused rows, the output made of the parts.

A chunk is recorded in parts, each of which is renamed into place before its record is. A job that is killed
at any time finds either both, or computes the rows again.
"""

import io
import json
import posixpath
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial, reduce
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout
from pyarrow import fs

from attention_client.enrich.batches import Batch
from attention_client.enrich.outcome import EnrichError, Figures, Refusal, counted
from attention_client.enrich.plan import JOB_KEY, Chunk, JobPlan
from attention_client.enrich.tables import (
    Json,
    Location,
    check_columns,
    format_of,
    is_table,
    open_table,
    share_dictionaries,
)

FOLDER, PART, RECORD, SAVED, REJECTS = ".partial", ".arrows", ".json", ".npz", ".rejects.jsonl"
# How often finished work is kept. A request in progress is lost with a job that is killed, too.
KEEP_SECONDS = 10.0


class Journal:
    """The folder of one job, beside the output.

    Attributes:
        result: Where the result is assembled.
    """

    def __init__(self, output: Location, plan: JobPlan) -> None:
        self._folder = output.with_suffix(FOLDER)
        self.result = self._folder / "result"
        self._chunks = self._folder / "chunks"
        self._header = self._folder / "job.json"
        self._fingerprint = plan.fingerprint
        self._rows = sum(file.rows for file in plan.source.files)

    @contextmanager
    def open(self, *, resume: bool) -> Iterator[None]:
        """Starts or continues a job, and locks the folder. Removes it again if nothing was kept.

        Other processes are locked out on a local file system only.

        Raises:
            EnrichError: There is an unfinished job and `resume` is false, it is a different job, or another
                process is running it.
        """
        self._chunks.make_folder()
        with ExitStack() as stack:
            if isinstance(self._folder.system, fs.LocalFileSystem):
                try:
                    stack.enter_context(FileLock((self._folder / "lock").path, timeout=0))
                except Timeout as error:
                    raise EnrichError(f"another process is writing {self._folder}") from error
            try:
                self._begin(resume=resume)
                yield
            finally:
                if not self._has_work():
                    self.remove()

    def _begin(self, *, resume: bool) -> None:
        if not self._has_work():
            self._header.write_json(self._fingerprint)
        elif not resume:
            raise EnrichError(
                f"{self._folder} contains an unfinished job, of which {self.kept()}: continue it with "
                "--resume (resume=True), or remove the folder"
            )
        elif changed := self._differences():
            raise EnrichError(
                f"{self._folder} contains a job that differs in {', '.join(changed)} and cannot be resumed: "
                "run it as it was started, or remove the folder"
            )

    def _differences(self) -> list[str]:
        recorded, now = self._header.read_json(), self._fingerprint
        return [name for name in now if recorded.get(name) != now[name]]

    def _has_work(self) -> bool:
        return any(name.endswith((RECORD, SAVED)) for name, _ in self._chunks.files())

    def kept(self) -> str:
        """How many rows are kept, for people."""
        rows = 0
        for name, _ in self._chunks.files():
            if name.endswith(RECORD):
                rows += (self._chunks / name).read_json()["figures"]["rows"]
            elif name.endswith(SAVED):
                rows += json.loads(str(_load(self._chunks / name)["state"]))["rows"]
        return f"{rows:,} of {counted(self._rows, 'row is', 'rows are')} kept"

    def remove(self) -> None:
        """Removes the folder."""
        self._folder.remove()

    def discard(self) -> None:
        """Removes the folder if it belongs to this job."""
        if self._header.exists and not self._differences():
            self.remove()

    def _file(self, chunk: Chunk, number: int, suffix: str) -> Location:
        return self._chunks / f"{chunk.index:06}-{number:04}{suffix}"

    def _files(self, chunk: Chunk, suffix: str) -> list[Location]:
        """The files of a chunk, numbered from 0."""
        files: list[Location] = []
        while (file := self._file(chunk, len(files), suffix)).exists:
            files.append(file)
        return files

    def parts(self, chunk: Chunk) -> list[Location]:
        """The Arrow IPC streams with the finished rows of a chunk, in order."""
        return [self._file(chunk, number, PART) for number in range(len(self._files(chunk, RECORD)))]

    def pending(self, chunk: Chunk) -> Chunk | None:
        """The rows of a chunk that are not finished; None if all are."""
        records = self._files(chunk, RECORD)
        start = records[-1].read_json()["stop"] if records else chunk.start
        return None if records and start == chunk.stop else replace(chunk, start=start)

    def read(self, chunk: Chunk) -> Figures:
        """The figures of the finished rows of a chunk."""
        total = Figures()
        for record in self._files(chunk, RECORD):
            figures = record.read_json()["figures"]
            refusals = [Refusal(**refusal) for refusal in figures["refusals"]]
            total.add(Figures(**{**figures, "refusals": refusals}))
        return total

    def saved(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The results of a batch that was not finished, as `Batch.save` returned them."""
        return [_load(file) for file in self._files(chunk, SAVED)]

    def save(self, chunk: Chunk, results: Mapping[str, Any]) -> None:
        """Keeps further results of a batch that is not finished."""
        with self._file(chunk, len(self._files(chunk, SAVED)), SAVED).replaced() as file:
            np.savez(file, **results)

    def new_part(self, chunk: Chunk) -> Location:
        """Where the next rows of a chunk are written, before they are recorded."""
        return self._file(chunk, len(self._files(chunk, RECORD)), PART)

    def record(self, chunk: Chunk, figures: Figures, stop: int) -> None:
        """Records that the rows of a chunk up to, but not including, `stop` are finished."""
        record = self._file(chunk, len(self._files(chunk, RECORD)), RECORD)
        record.write_json({"stop": stop, "figures": asdict(figures)})
        for saved in self._files(chunk, SAVED):
            saved.remove()


def _load(file: Location) -> dict[str, Any]:
    with file.open() as content:
        return dict(np.load(io.BytesIO(content.read()), allow_pickle=False))


class ChunkWriter(AbstractContextManager["ChunkWriter"]):
    """Writes the finished rows of a chunk in parts, and keeps what is finished every KEEP_SECONDS."""

    def __init__(self, journal: Journal, chunk: Chunk, schema: pa.Schema) -> None:
        self._files = ExitStack()
        self._journal = journal
        self._chunk = chunk
        self._schema = schema
        self._begin()

    def _begin(self) -> None:
        self._part: pa.ipc.RecordBatchStreamWriter | None = None
        self._figures, self._stop = Figures(), self._chunk.start
        self._has_saved, self._due = False, time.monotonic() + KEEP_SECONDS

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> bool | None:
        if kind is None:
            self._record()
        return self._files.__exit__(kind, *error)

    def add(self, batch: Batch) -> Figures:
        """Waits for the results of the next batch, and writes them."""
        figures = batch.finish(partial(self._keep, batch))
        if self._part is None:
            file = self._files.enter_context(self._journal.new_part(self._chunk).replaced())
            self._part = self._files.enter_context(pa.ipc.new_stream(file, self._schema))
        for rows in batch.output():
            self._part.write_batch(rows)
        self._figures.add(figures)
        self._stop = batch.first + figures.rows
        if self._has_saved or time.monotonic() >= self._due:
            self._record()
        return figures

    def _keep(self, batch: Batch) -> None:
        """Keeps the batches before an unfinished one, and what is finished of it."""
        if time.monotonic() >= self._due:
            self._record()
            self._journal.save(self._chunk, batch.save())
            self._has_saved, self._due = True, time.monotonic() + KEEP_SECONDS

    def _record(self) -> None:
        if self._part is not None:
            self._files.close()
            self._journal.record(self._chunk, self._figures, self._stop)
            self._begin()


def write_rejects(plan: JobPlan, records: Sequence[Figures], target: Location) -> str | None:
    """Writes one line of JSON for each refused row.

    Args:
        plan: The job.
        records: The records of all chunks in order.
        target: The output.

    Returns:
        The path of the file; None if no row was refused. A file of an earlier job is removed.
    """
    rejects = target.with_suffix(REJECTS)
    rejects.remove()
    if not any(record.refusals for record in records):
        return None
    with rejects.replaced() as file:
        for chunk, record in zip(plan.chunks, records, strict=True):
            for refusal in record.refusals:
                line: Json = {"file": plan.source.path(chunk.name), **asdict(refusal)}
                file.write(json.dumps(line).encode() + b"\n")
    return str(rejects)


class OutputAssembler:
    """Writes the output on its own thread, while chunks are computed: each part after all earlier ones."""

    def __init__(self, plan: JobPlan, journal: Journal, target: Location) -> None:
        self._plan = plan
        self._journal = journal
        self._target = target
        self._names = _output_names(plan, target)
        # For each Arrow IPC file of the result no rows, with the dictionaries of all rows.
        self._dictionaries: dict[str, pa.RecordBatch] = {}
        self._check_columns()
        self._finished: dict[int, Future[None]] = {chunk.index: Future() for chunk in plan.chunks}
        self._thread = ThreadPoolExecutor(1, "assembler")
        self._written = self._thread.submit(self._write)

    def _check_columns(self) -> None:
        """Refuses columns that the output cannot hold, before anything is computed."""
        plan, checked = self._plan, set()
        for name, path in self._names.items():
            output = format_of(path)
            shares = output.writer is pa.ipc.new_file and "dictionary<" in str(plan.output_schema)
            if output in checked and not shares:
                continue
            checked.add(output)
            with closing(plan.source.open(name)) as table:
                batches = (rows for _, rows in table.batches(0, table.rows if shares else 1))
                rows = map(plan.first_row, batches)
                first = next(rows, None) or plan.first_row(plan.source.no_rows())
                check_columns(first, path)
                if shares:
                    self._dictionaries[name] = reduce(share_dictionaries, rows, first).slice(0, 0)

    def add(self, chunk: Chunk) -> None:
        """Adds a finished chunk.

        Raises:
            OSError: The output cannot be written.
        """
        if self._written.done():
            self._written.result()
        self._finished[chunk.index].set_result(None)

    def move_into_place(self) -> None:
        """Waits until all chunks are written, and renames the result to the output.

        Raises:
            OSError: The output cannot be written.
        """
        self._written.result()
        self._target.remove()
        result = self._journal.result
        (result / self._names[""] if is_table(self._target.path) else result).move(self._target)

    def close(self) -> None:
        """Ends the thread."""
        for chunk in self._finished.values():
            chunk.cancel()
        self._thread.shutdown()

    def _write(self) -> None:
        for name, group in groupby(self._plan.chunks, key=lambda chunk: chunk.name):
            written, chunks = self._journal.result / self._names[name], list(group)
            if written.exists:
                continue
            (self._journal.result / posixpath.dirname(self._names[name])).make_folder()
            try:
                self._write_file(written, chunks)
            except CancelledError:  # the job ends before all chunks are finished
                return
            for chunk in chunks:
                for part in self._journal.parts(chunk):
                    part.remove()

    def _write_file(self, written: Location, chunks: Sequence[Chunk]) -> None:
        schema, dictionaries = self._plan.output_schema, self._dictionaries.get(chunks[0].name)
        with written.replaced() as file, closing(format_of(written.path).writer(file, schema)) as writer:
            for chunk in chunks:
                self._finished[chunk.index].result()
                for part in self._journal.parts(chunk):
                    with part.open() as source, pa.ipc.open_stream(source) as batches:
                        for rows in batches:
                            writer.write_batch(
                                rows if dictionaries is None else share_dictionaries(dictionaries, rows)
                            )


def _output_names(plan: JobPlan, target: Location) -> dict[str, str]:
    """For each file of the source, the path of its result relative to the output's folder."""
    single = posixpath.basename(target.path) if is_table(target.path) else plan.source.name
    return {file.name: file.name or single for file in plan.source.files}


def is_complete(plan: JobPlan, target: Location) -> bool:
    """Whether an existing output is the complete result of the same job."""
    added = plan.output_schema.field(len(plan.output_schema) - 1)
    is_file = is_table(target.path)
    files = [target if is_file else target / name for name in _output_names(plan, target).values()]
    return all(file.exists and _job_of(file, added.name) == added.metadata[JOB_KEY] for file in files)


def _job_of(file: Location, column: str) -> bytes | None:
    """Identifies the job that added a column to a table; None if no job did."""
    with closing(open_table(file)) as table:
        index = table.schema.get_field_index(column)
    metadata = table.schema.field(index).metadata if index >= 0 else None
    return (metadata or {}).get(JOB_KEY)
