"""What the kernel says of processes: processor time and resident memory of a process and its children."""

import os
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
STATE, PARENT, USER_TICKS, SYSTEM_TICKS = 0, 1, 11, 12  # fields of stat after the name


def family(pid: int) -> list[int]:
    """The process and all processes below it."""
    parents: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit() and (fields := _stat(int(folder.name))):
            parents.setdefault(int(fields[PARENT]), []).append(int(folder.name))
    found, at = [pid], 0
    while at < len(found):
        found += parents.get(found[at], [])
        at += 1
    return found


def runs(pid: int) -> bool:
    """Whether the process is there and has not ended."""
    fields = _stat(pid)
    return bool(fields) and fields[STATE] != "Z"


def processor_seconds(pids: list[int]) -> float:
    """User and system time of some processes, all threads; those that ended count nothing."""
    stats = [fields for pid in pids if (fields := _stat(pid))]
    return sum(int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS]) for fields in stats) / TICKS


def resident_bytes(pids: list[int]) -> int:
    """Resident memory of some processes, shared pages counted once for each."""
    pages = 0
    for pid in pids:
        try:
            pages += int((PROC / str(pid) / "statm").read_text().split()[1])
        except OSError:  # it ended
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


def _stat(pid: int) -> list[str]:
    try:
        # The name stands in brackets and may hold anything, brackets too.
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it ended
        return []
