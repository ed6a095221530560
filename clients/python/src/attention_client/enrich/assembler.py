"""The files of the result, written from the parts while other chunks are being done."""

import posixpath
import queue
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import groupby
from types import TracebackType
from typing import Self

import pyarrow as pa

from attention_client.enrich.journal import Journal
from attention_client.enrich.plan import Chunk, Plan
from attention_client.enrich.storage import Location
from attention_client.enrich.tables import is_table, open_writer


class Result:
    """Puts the parts together on a thread of its own: each when it and all before it are done."""

    def __init__(self, plan: Plan, journal: Journal, target: Location) -> None:
        self._plan = plan
        self._journal = journal
        self._folder = journal.result
        self._target = target
        # By file of the input the name of its result below the output.
        own = posixpath.basename(target.path) if is_table(target.path) else plan.source.name
        self._names = {file.name: file.name or own for file in plan.source.files}
        self._told: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._done: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "result")
        self._written = self._thread.submit(self._write)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._told.put(None)
        self._thread.shutdown()

    def add(self, chunk: Chunk) -> None:
        """Takes note of a chunk that is done.

        Raises:
            OSError: The result cannot be written.
        """
        if self._written.done():
            self._written.result()
        self._told.put(chunk)

    def move(self) -> None:
        """Waits for the last chunk and moves the result into its place.

        Raises:
            OSError: The result cannot be written.
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
                self._put_together(written, chunks)
            except _StoppedError:
                return
            for chunk in chunks:
                self._journal.part(chunk).remove()

    def _put_together(self, written: Location, chunks: Iterable[Chunk]) -> None:
        schema = self._plan.output_schema
        with written.replaced() as file, closing(open_writer(written.path, file, schema)) as writer:
            for chunk in chunks:
                self._wait_for(chunk)
                _copy(self._journal.part(chunk), writer.write)

    def _wait_for(self, chunk: Chunk) -> None:
        while chunk.index not in self._done:
            told = self._told.get()
            if told is None:
                raise _StoppedError
            self._done.add(told.index)


class _StoppedError(Exception):
    """The job ends before the chunk that is waited for is done."""


def _copy(part: Location, write: Callable[[pa.RecordBatch], None]) -> None:
    with part.open() as source:
        file = pa.ipc.open_file(source)
        for index in range(file.num_record_batches):
            write(file.get_batch(index))
