"""How far a job is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

LINE_SECONDS = 10.0


class Progress:
    """Counts rows and tokens and shows them on stderr.

    Attributes:
        total: Rows that there are to do.
        tokens: Query and key rows that were computed.
    """

    def __init__(self, rows: int, *, quiet: bool) -> None:
        self.tokens = 0
        self._rows = 0
        self.total = rows
        self._quiet = quiet
        self._started = self._shown = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=rows, unit="row", unit_scale=True, disable=quiet or not self._is_terminal)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, rows: int, tokens: int) -> None:
        """Some rows more are written."""
        self._rows += rows
        self.tokens += tokens
        rate = self.tokens / (time.monotonic() - self._started)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(rows)
        if not self._quiet and not self._is_terminal:
            self._line(rate)

    def _line(self, rate: float) -> None:
        now = time.monotonic()
        if now - self._shown >= LINE_SECONDS or self._rows == self.total:
            self._shown = now
            left = (now - self._started) / max(self._rows, 1) * (self.total - self._rows)
            done = f"{self._rows:,} of {self.total:,} rows, {rate:,.0f} tokens/s, {left:,.0f} s left"
            sys.stderr.write(f"{done}\n")
            sys.stderr.flush()
