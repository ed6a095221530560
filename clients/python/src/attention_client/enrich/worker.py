"""Computes chunks in this process: reads their rows, submits them, writes and records the results."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import groupby
from math import ceil
from operator import itemgetter

import pyarrow as pa

from attention_client.enrich.arrow_ipc import ArrowFileWriter
from attention_client.enrich.backend import Backend
from attention_client.enrich.inputs import BatchInputs, InputReader
from attention_client.enrich.journal import ChunkRecord, Journal
from attention_client.enrich.options import JobOptions
from attention_client.enrich.packing import BATCH_REQUESTS
from attention_client.enrich.pending_batch import PendingBatch
from attention_client.enrich.plan import Chunk, JobPlan
from attention_client.enrich.progress import ProgressReporter
from attention_client.enrich.read_ahead import read_ahead
from attention_client.enrich.tables import RowBatch


def run_chunks(
    plan: JobPlan,
    chunks: Iterable[Chunk],
    backend: Backend,
    options: JobOptions,
    journal: Journal,
    progress: ProgressReporter,
) -> Generator[Chunk, None, None]:
    """Computes chunks in their order, and yields each when it is recorded.

    Raises:
        EnrichError: The job cannot continue. Recorded chunks are kept.
    """
    for chunk, batches in groupby(_pending(plan, chunks, backend, options), key=itemgetter(0)):
        record = ChunkRecord()
        with (
            journal.part(chunk).replaced() as file,
            closing(ArrowFileWriter(file, plan.output_schema)) as part,
        ):
            for _, batch in batches:
                enriched = batch.finish()
                for rows in enriched.output:
                    part.write(rows)
                record.add(enriched)
                progress.add(enriched.rows, enriched.tokens)
        journal.write(chunk, record)
        yield chunk


def _pending(
    plan: JobPlan, chunks: Iterable[Chunk], backend: Backend, options: JobOptions
) -> Iterator[tuple[Chunk, PendingBatch]]:
    """Submitted batches, in order. Their number is bounded, so a slow writer slows the reader down."""
    # Enough for the backend's concurrent requests, one batch to submit and one to write.
    limit = 2 + ceil(backend.concurrency / BATCH_REQUESTS)
    pending: deque[tuple[Chunk, PendingBatch]] = deque()
    # Cells are read and texts are encoded on a thread, while requests are computed and results are written.
    with closing(read_ahead(_inputs(plan, chunks, InputReader(backend, options)))) as ready:
        for chunk, inputs in ready:
            if len(pending) >= limit:
                yield pending.popleft()
            pending.append((chunk, PendingBatch(inputs, plan.output_schema, backend, options)))
    while pending:
        yield pending.popleft()


def _inputs(
    plan: JobPlan, chunks: Iterable[Chunk], reader: InputReader
) -> Generator[tuple[Chunk, BatchInputs], None, None]:
    for chunk, batch in _batches(plan, chunks):
        yield chunk, reader.read(batch)


def _batches(plan: JobPlan, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, RowBatch]]:
    """The batches of chunks, none of which spans two chunks. Each file is opened once."""
    for name, group in groupby(chunks, key=lambda chunk: chunk.name):
        with closing(plan.source.open(name)) as table:
            for adjacent in _adjacent(group):
                first, last = adjacent[0], adjacent[-1]
                yield from _assign(adjacent, table.batches(first.start, last.stop))
                if first.start == first.stop:  # a file without rows has one chunk, with an empty batch
                    yield first, RowBatch(0, pa.RecordBatch.from_pylist([], schema=plan.source.schema))


def _adjacent(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Groups of chunks without a gap between them."""
    for _, group in groupby(enumerate(chunks), key=lambda pair: pair[1].index - pair[0]):
        yield [chunk for _, chunk in group]


def _assign(chunks: list[Chunk], batches: Iterable[RowBatch]) -> Iterator[tuple[Chunk, RowBatch]]:
    """Batches with their chunks, split at the end of each chunk."""
    remaining = deque(chunks)
    for first, rows in batches:
        offset = 0
        while offset < rows.num_rows:
            while first + offset >= remaining[0].stop:
                remaining.popleft()
            count = min(remaining[0].stop - first, rows.num_rows) - offset
            yield remaining[0], RowBatch(first + offset, rows.slice(offset, count))
            offset += count
