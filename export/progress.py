"""Shows the steps of an export on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from attention_serving.export.artifact import UNCHANGED, Progress, silent


@contextmanager
def showing(progress: Callable[[str], object] | None = None) -> Iterator[Progress]:
    """The given progress; or one that shows the current step if standard error is a terminal."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or silent
        return
    console = Console(file=sys.stderr, highlight=False)
    with console.status("") as status:

        def show(step: str) -> None:
            console.print(step) if step == UNCHANGED else status.update(step)

        yield show
