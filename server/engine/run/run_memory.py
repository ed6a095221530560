"""The memory of runs: measured by the peak of this process, and returned to the system after large ones."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from attention_serving.server.engine.model import LoadedModel

CLEAR = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
# Writing this to CLEAR resets the peak, VmHWM, to the present size. Source: man 5 proc.
RESET_PEAK = "5"
# Smaller runs leave too little memory in the arena to matter.
LARGE_RUN_BYTES = 64 << 20
# After this time without a large run, the next one is not expected soon.
IDLE_SECONDS = 5.0


def peak_bytes(run: Callable[[], object]) -> int | None:
    """By how much resident memory grows at most during a run, in bytes.

    Other threads should be idle. None if the system does not permit the measurement.
    """
    _return_freed_memory()
    try:
        CLEAR.write_text(RESET_PEAK)
        before = _status("VmRSS")
    except (OSError, KeyError):
        return None
    run()
    return max(0, _status("VmHWM") - before)


def _return_freed_memory() -> None:
    """Returns to the system what the C library keeps, so that a run cannot use it unnoticed."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    lines = (line.split() for line in STATUS.read_text().splitlines())
    values = {words[0].rstrip(":"): words[1] for words in lines if len(words) > 1}
    return int(values[name]) * 1024


class ArenaTrimmer:
    """Decides when memory that large runs left in the runtime's arena is returned to the system.

    Watches for the end of a burst of large runs. Has no thread, lock or clock of its own.
    """

    def __init__(self) -> None:
        self._model: LoadedModel | None = None
        self._due = 0.0

    @property
    def wait_seconds(self) -> float | None:
        """How long to wait before asking `due` again; None if there is nothing to trim."""
        return IDLE_SECONDS if self._model else None

    def note_run(self, model: LoadedModel, run_bytes: int, now: float) -> None:
        """Records that a run ended which needed this much memory."""
        if run_bytes >= LARGE_RUN_BYTES:
            self._model = model
            self._due = now + IDLE_SECONDS

    def due(self, now: float) -> LoadedModel | None:
        """A model to trim the arena with, once, after a burst has ended."""
        if now < self._due:
            return None
        model, self._model = self._model, None
        return model
