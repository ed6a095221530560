"""Progress of a job on stderr: a bar on a terminal, otherwise a line from time to time."""

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

LINE_SECONDS = 10.0


class ProgressReporter:
    """Counts rows and tokens, and reports them if asked.

    Attributes:
        total: Rows to compute.
        tokens: Query and key rows computed so far.
    """

    def __init__(self, rows: int, *, show: bool) -> None:
        self.total = rows
        self.tokens = 0
        self._rows = 0
        self._started = self._reported = time.monotonic()
        is_terminal = sys.stderr.isatty()
        self._lines = show and not is_terminal
        self._bar = tqdm(total=rows, unit="row", unit_scale=True, disable=not (show and is_terminal))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, rows: int, tokens: int) -> None:
        """Counts computed rows."""
        self._rows += rows
        self.tokens += tokens
        now = time.monotonic()
        rate = self.tokens / max(now - self._started, 1e-9)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(rows)
        if self._lines and (now - self._reported >= LINE_SECONDS or self._rows == self.total):
            self._reported = now
            left = (now - self._started) / max(self._rows, 1) * (self.total - self._rows)
            line = f"{self._rows:,} of {self.total:,} rows, {rate:,.0f} tokens/s, {left:,.0f} s left\n"
            sys.stderr.write(line)
            sys.stderr.flush()
