"""Measures the memory that a run takes, by the peak of this process's resident memory."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CLEAR = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
# Writing this to CLEAR resets the peak, VmHWM, to the present size. Source: man 5 proc.
RESET_PEAK = "5"


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
