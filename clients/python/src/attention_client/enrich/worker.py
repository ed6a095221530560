"""Does chunks: reads their rows, has them computed, writes their parts. Bounded in memory."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import groupby
from math import ceil
from operator import itemgetter

import pyarrow as pa

from attention_client.enrich.backend import Backend
from attention_client.enrich.journal import Journal, Record
from attention_client.enrich.plan import Chunk, Options, Plan
from attention_client.enrich.progress import Progress
from attention_client.enrich.row_batch import ROW_BATCH_REQUESTS, Window
from attention_client.enrich.tables import ArrowOut


def run_chunks(
    plan: Plan,
    chunks: Iterable[Chunk],
    backend: Backend,
    options: Options,
    journal: Journal,
    progress: Progress,
) -> Generator[Chunk, None, None]:
    """Does chunks in their order, and yields each when it is recorded.

    Raises:
        EnrichError: The job cannot go on. What was recorded stays.
    """
    under_way = _under_way(plan, chunks, backend, options)
    for chunk, windows in groupby(under_way, key=itemgetter(0)):
        record = Record()
        with journal.part(chunk).replaced() as file, closing(ArrowOut(file, plan.output_schema)) as part:
            for _, window in windows:
                done = window.finish()
                part.write(done.batch)
                record.add(done)
                progress.add(done.batch.num_rows, done.tokens)
        journal.write(chunk, record)
        yield chunk


def _under_way(
    plan: Plan, chunks: Iterable[Chunk], backend: Backend, options: Options
) -> Iterator[tuple[Chunk, Window]]:
    """Windows that are being computed.

    A bounded number of them is read and not yet written, so a slow writer holds the reader back.
    """
    ahead: deque[tuple[Chunk, Window]] = deque()
    for chunk, first, batch in _rows(plan, chunks):
        if len(ahead) >= _row_batches_ahead(backend):
            yield ahead.popleft()
        ahead.append((chunk, Window(first, batch, plan.output_schema, backend, options)))
    while ahead:
        yield ahead.popleft()


def _row_batches_ahead(backend: Backend) -> int:
    """Enough for every request that the backend computes at the same time, and two to read and write."""
    return 2 + ceil(backend.concurrency / ROW_BATCH_REQUESTS)


def _rows(plan: Plan, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, int, pa.RecordBatch]]:
    """The windows of chunks, each within one chunk. A file is read through once."""
    for name, group in groupby(chunks, key=lambda chunk: chunk.name):
        own = list(group)
        with closing(plan.source.open(name)) as table:
            for run in _consecutive(own):
                yield from _cut(run, table.windows(run[0].start, run[-1].stop))
                if run[0].start == run[0].stop:  # a file without rows has one chunk, with an empty window
                    yield run[0], 0, pa.RecordBatch.from_pylist([], schema=plan.source.schema)


def _consecutive(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    """Runs of chunks without a gap."""
    for _, run in groupby(enumerate(chunks), key=lambda pair: pair[1].index - pair[0]):
        yield [chunk for _, chunk in run]


def _cut(
    chunks: list[Chunk], windows: Iterable[tuple[int, pa.RecordBatch]]
) -> Iterator[tuple[Chunk, int, pa.RecordBatch]]:
    """Windows cut where a chunk ends."""
    left = deque(chunks)
    for first, batch in windows:
        at = 0
        while at < batch.num_rows:
            while first + at >= left[0].stop:
                left.popleft()
            rows = min(left[0].stop - first, batch.num_rows) - at
            yield left[0], first + at, batch.slice(at, rows)
            at += rows
