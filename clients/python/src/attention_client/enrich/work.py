"""Does pieces: reads their rows, has them computed, writes their parts. Bounded in memory."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import groupby
from types import TracebackType

import pyarrow as pa

from attention_client.enrich.computing import Computer
from attention_client.enrich.journal import Journal, Record
from attention_client.enrich.plan import Options, Piece, Plan
from attention_client.enrich.progress import Progress
from attention_client.enrich.tables import ArrowOut, open_table
from attention_client.enrich.windows import Refusal, Window


def do_pieces(
    plan: Plan,
    pieces: Iterable[Piece],
    computer: Computer,
    options: Options,
    journal: Journal,
    progress: Progress,
) -> None:
    """Does pieces in their order and records each.

    At most `computer.windows_ahead` windows are read and not yet written: that bounds memory, and lets a
    writer that is slow hold the reader back.

    Raises:
        EnrichError: The job cannot go on. What was recorded stays.
    """
    under_way: deque[tuple[Piece, Window]] = deque()
    with _Parts(plan, journal, progress) as parts:
        for piece, first, batch in _rows(plan, pieces):
            if len(under_way) >= computer.windows_ahead:
                parts.write(*under_way.popleft())
            under_way.append((piece, Window(first, batch, plan.output_schema, computer, options)))
        while under_way:
            parts.write(*under_way.popleft())


def _rows(plan: Plan, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, int, pa.RecordBatch]]:
    """The windows of pieces, each within one piece. A file is read through once."""
    for name, group in groupby(pieces, key=lambda piece: piece.name):
        own = list(group)
        with closing(open_table(plan.file(name))) as table:
            for run in _consecutive(own):
                yield from _cut(run, table.windows(run[0].start, run[-1].stop))
                if run[0].start == run[0].stop:  # a file without rows has one piece, with an empty window
                    yield run[0], 0, pa.RecordBatch.from_pylist([], schema=plan.schema)


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


class _Parts:
    """Writes windows to the parts of their pieces, one part at a time."""

    def __init__(self, plan: Plan, journal: Journal, progress: Progress) -> None:
        self._plan = plan
        self._journal = journal
        self._progress = progress
        self._piece: Piece | None = None
        self._open = ExitStack()

    def __enter__(self) -> "_Parts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._close()
        else:
            self._open.__exit__(kind, error, trace)

    def write(self, piece: Piece, window: Window) -> None:
        """Waits for a window's results and appends them to its piece's part."""
        done = window.finish()
        if piece != self._piece:
            self._close()
            self._begin(piece)
        self._writer.write(done.batch)
        self._rows += done.batch.num_rows
        self._tokens += done.tokens
        self._nulls += done.nulls
        self._refusals += done.refusals
        self._progress.add(done.batch.num_rows, done.tokens)

    def _begin(self, piece: Piece) -> None:
        self._piece = piece
        file = self._open.enter_context(self._journal.part(piece).replaced())
        self._writer = ArrowOut(file, self._plan.output_schema)
        self._rows = self._tokens = self._nulls = 0
        self._refusals: list[Refusal] = []

    def _close(self) -> None:
        if self._piece is not None:
            self._writer.close()
            self._open.close()
            record = Record(self._rows, self._tokens, self._nulls, self._refusals)
            self._journal.write(self._piece, record)
            self._piece = None
