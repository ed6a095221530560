"""Assembles the output from the parts of finished chunks, while other chunks are computed."""

import posixpath
import queue
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import groupby
from types import TracebackType
from typing import Self

import pyarrow as pa

from attention_client.enrich.formats import is_table, open_table, open_writer
from attention_client.enrich.journal import Journal
from attention_client.enrich.plan import JOB_KEY, Chunk, JobPlan
from attention_client.enrich.storage import Location


class OutputAssembler:
    """Writes the output on its own thread: each part once it and all earlier ones are finished."""

    def __init__(self, plan: JobPlan, journal: Journal, target: Location) -> None:
        self._plan = plan
        self._journal = journal
        self._folder = journal.result
        self._target = target
        self._names = output_names(plan, target)
        self._finished: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._known: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "assembler")
        self._written = self._thread.submit(self._write)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.put(None)
        self._thread.shutdown()

    def add(self, chunk: Chunk) -> None:
        """Adds a finished chunk.

        Raises:
            OSError: The output cannot be written.
        """
        if self._written.done():
            self._written.result()
        self._finished.put(chunk)

    def move_into_place(self) -> None:
        """Waits until all chunks are written, and renames the result to the output.

        Raises:
            OSError: The output cannot be written.
        """
        self._written.result()
        self._target.remove()
        is_file = is_table(self._target.path)
        (self._folder / self._names[""] if is_file else self._folder).move(self._target)

    def _write(self) -> None:
        for name, group in groupby(self._plan.chunks, key=lambda chunk: chunk.name):
            written, chunks = self._folder / self._names[name], list(group)
            if written.exists:
                continue
            written.parent.make_folder()
            try:
                self._write_file(written, chunks)
            except _JobEndedError:
                return
            for chunk in chunks:
                self._journal.part(chunk).remove()

    def _write_file(self, written: Location, chunks: Iterable[Chunk]) -> None:
        schema = self._plan.output_schema
        with written.replaced() as file, closing(open_writer(written.path, file, schema)) as writer:
            for chunk in chunks:
                self._wait_for(chunk)
                _copy(self._journal.part(chunk), writer.write)

    def _wait_for(self, chunk: Chunk) -> None:
        while chunk.index not in self._known:
            finished = self._finished.get()
            if finished is None:
                raise _JobEndedError
            self._known.add(finished.index)


class _JobEndedError(Exception):
    """The job ended before the chunk was finished."""


def _copy(part: Location, write: Callable[[pa.RecordBatch], None]) -> None:
    with part.open() as source:
        file = pa.ipc.open_file(source)
        for index in range(file.num_record_batches):
            write(file.get_batch(index))


def output_names(plan: JobPlan, target: Location) -> dict[str, str]:
    """For each file of the source, the path of its result relative to the output's folder."""
    own = posixpath.basename(target.path) if is_table(target.path) else plan.source.name
    return {file.name: file.name or own for file in plan.source.files}


def is_complete(plan: JobPlan, target: Location) -> bool:
    """Whether an existing output is the complete result of the same job."""
    added = plan.output_schema.field(len(plan.output_schema) - 1)
    is_file = is_table(target.path)
    files = [target if is_file else target / name for name in output_names(plan, target).values()]
    return all(file.exists and _job_of(file, added.name) == added.metadata[JOB_KEY] for file in files)


def _job_of(file: Location, column: str) -> bytes | None:
    """Identifies the job that added a column to a table; None if no job did."""
    table = open_table(file)
    table.close()
    index = table.schema.get_field_index(column)
    metadata = table.schema.field(index).metadata if index >= 0 else None
    return (metadata or {}).get(JOB_KEY)
