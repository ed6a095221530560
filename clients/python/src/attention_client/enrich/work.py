"""Does pieces: reads their rows, has them computed, writes their parts. Bounded in memory."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import groupby
from operator import itemgetter

import pyarrow as pa

from attention_client.enrich.computing import Computer
from attention_client.enrich.journal import Journal, Record
from attention_client.enrich.plan import Options, Piece, Plan
from attention_client.enrich.progress import Progress
from attention_client.enrich.tables import ArrowOut
from attention_client.enrich.windows import Window


def do_pieces(
    plan: Plan,
    pieces: Iterable[Piece],
    computer: Computer,
    options: Options,
    journal: Journal,
    progress: Progress,
) -> Generator[Piece, None, None]:
    """Does pieces in their order, and yields each when it is recorded.

    Raises:
        EnrichError: The job cannot go on. What was recorded stays.
    """
    under_way = _under_way(plan, pieces, computer, options)
    for piece, windows in groupby(under_way, key=itemgetter(0)):
        record = Record()
        with journal.part(piece).replaced() as file, closing(ArrowOut(file, plan.output_schema)) as part:
            for _, window in windows:
                done = window.finish()
                part.write(done.batch)
                record.add(done)
                progress.add(done.batch.num_rows, done.tokens)
        journal.write(piece, record)
        yield piece


def _under_way(
    plan: Plan, pieces: Iterable[Piece], computer: Computer, options: Options
) -> Iterator[tuple[Piece, Window]]:
    """Windows that are being computed.

    At most `computer.windows_ahead` are read and not yet written: that bounds memory, and lets a slow writer
    hold the reader back.
    """
    ahead: deque[tuple[Piece, Window]] = deque()
    for piece, first, batch in _rows(plan, pieces):
        if len(ahead) >= computer.windows_ahead:
            yield ahead.popleft()
        ahead.append((piece, Window(first, batch, plan.output_schema, computer, options)))
    while ahead:
        yield ahead.popleft()


def _rows(plan: Plan, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, int, pa.RecordBatch]]:
    """The windows of pieces, each within one piece. A file is read through once."""
    for name, group in groupby(pieces, key=lambda piece: piece.name):
        own = list(group)
        with closing(plan.source.open(name)) as table:
            for run in _consecutive(own):
                yield from _cut(run, table.windows(run[0].start, run[-1].stop))
                if run[0].start == run[0].stop:  # a file without rows has one piece, with an empty window
                    yield run[0], 0, pa.RecordBatch.from_pylist([], schema=plan.source.schema)


def _consecutive(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Runs of pieces without a gap."""
    for _, run in groupby(enumerate(pieces), key=lambda pair: pair[1].index - pair[0]):
        yield [piece for _, piece in run]


def _cut(
    pieces: list[Piece], windows: Iterable[tuple[int, pa.RecordBatch]]
) -> Iterator[tuple[Piece, int, pa.RecordBatch]]:
    """Windows cut where a piece ends."""
    left = deque(pieces)
    for first, batch in windows:
        at = 0
        while at < batch.num_rows:
            while first + at >= left[0].stop:
                left.popleft()
            rows = min(left[0].stop - first, batch.num_rows) - at
            yield left[0], first + at, batch.slice(at, rows)
            at += rows
